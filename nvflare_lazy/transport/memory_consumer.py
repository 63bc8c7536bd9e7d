# SPDX-License-Identifier: Apache-2.0
"""Receives a payload into memory, each tensor into the memory it will stay in."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from nvflare_lazy.errors import ProtocolError
from nvflare_lazy.transport.consumers import PayloadConsumer
from nvflare_lazy.transport.sinks import MemorySink
from nvflare_lazy.transport.stock_items import unpack_item

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvflare_lazy.transport.families import Family
    from nvflare_lazy.transport.manifest import Manifest


class MemoryConsumer(PayloadConsumer):
    """Makes ordinary values.

    Args:
        family: What kind of values.
        received_cb: Called with a dictionary of values as they are complete, one call at a time; what it returns, if
            that is a dictionary, becomes part of the result instead of them. Without it they are the result.
        cb_kwargs: Further arguments for it.
    """

    def __init__(
        self,
        family: Family,
        received_cb: Callable[..., Any] | None = None,
        cb_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(family)
        if received_cb is not None and not callable(received_cb):
            raise ValueError(f"the callback for what is received must be callable, and is {received_cb!r}")
        self._received_cb = received_cb
        self._cb_kwargs = cb_kwargs or {}
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._sink: MemorySink | None = None
        self._order: list[str] = []

    def consume_items(self, items: list[Any], result: Any) -> Any:
        """Make values of items in NVFlare's form."""
        if not isinstance(items, list):
            raise TypeError(f"items must be a list, not a {type(items).__name__}")
        result = {} if result is None else result
        for item in items:
            for name, dtype, shape, data in unpack_item(self.family, item, self._peer):
                value, memory = self.family.new(dtype, shape)
                memory[:] = data
                self._deliver(name, value, result)
        return result

    def open_sink(self, manifest: Manifest) -> MemorySink:
        """Assemble these values."""
        self.result = {}
        self._order = [item.name for item in manifest.items]
        self._sink = MemorySink(manifest, self.family, lambda name, value: self._deliver(name, value, self.result))
        return self._sink

    def finish(self) -> None:
        """Put the result into the order of the sender."""
        if self._sink is not None:
            self._sink.finish()
        if self._received_cb is None and self._order:
            self.result = {name: self.result[name] for name in self._order}
        if self.result is None:
            self.result = {}

    def _deliver(self, name: str, value: Any, result: dict[str, Any]) -> None:
        with self._lock:
            if name in self._seen:
                raise ProtocolError(f"{self._peer} sent {name!r} twice")
            self._seen.add(name)
            if self._received_cb is None:
                result[name] = value
                return
            made = self._received_cb({name: value}, **self._cb_kwargs)
            if isinstance(made, dict):
                result.update(made)
