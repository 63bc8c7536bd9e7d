# SPDX-License-Identifier: Apache-2.0
"""Receives a payload into memory, each tensor directly into its final buffer."""

from __future__ import annotations

import threading
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Protocol

from nvflare_lazy.errors import ProtocolError, SourceError, TransferError
from nvflare_lazy.scratch.rendezvous import open_shown
from nvflare_lazy.transport.receive import PayloadConsumer

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvflare_lazy.scratch.rendezvous import VisitedRendezvous
    from nvflare_lazy.tensors.tensor_file import FileSource, TensorFile
    from nvflare_lazy.transport._backends import ArrayBackend
    from nvflare_lazy.transport.handoff.wire import ShownFile
    from nvflare_lazy.transport.segments.manifest import Manifest, ManifestItem


class MemoryConsumer(PayloadConsumer):
    """Makes ordinary values.

    `received_cb` runs with a dictionary of values as they are complete, one call at a time, and with `cb_kwargs`.
    If it returns a dictionary, that becomes part of the result instead of them.
    """

    def __init__(
        self,
        backend: ArrayBackend,
        received_cb: Callable[..., Any] | None = None,
        cb_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(backend)
        if received_cb is not None and not callable(received_cb):
            raise ValueError(f"the callback for received values must be callable, got {received_cb!r}")
        self._received_cb = received_cb
        self._cb_kwargs = cb_kwargs or {}
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._sink: MemorySink | None = None
        self._order: list[str] = []

    def consume_items(self, items: list[Any], result: Any) -> Any:
        """Make values of items in NVFlare's form."""
        if not isinstance(items, list):
            raise TypeError(f"items must be a list, got {type(items).__name__}")
        result = {} if result is None else result
        for item in items:
            for name, dtype, shape, data in self.unpack(item):
                value, memory = self.backend.new(dtype, shape)
                memory[:] = data
                self._deliver(name, value, result)
        return result

    def open_sink(self, manifest: Manifest) -> MemorySink:
        """Assemble these values."""
        self.result = {}
        self._order = [item.name for item in manifest.items]
        self._sink = MemorySink(manifest, self.backend, lambda name, value: self._deliver(name, value, self.result))
        return self._sink

    def abandon_sink(self) -> None:
        """Release the values."""
        self.result, self._order, self._sink = None, [], None

    def open_shown(self, visited: VisitedRendezvous, shown: ShownFile) -> TensorFile:
        """Open a file to read it."""
        return open_shown(visited, shown.id, shown.nbytes)

    def take_sources(self, manifest: Manifest, source_of: Callable[[ManifestItem], FileSource]) -> None:
        """Read all values, each directly into its final buffer.

        Raises:
            TransferError: If one cannot be read after the callback got others, which cannot be undone.
        """
        result: dict[str, Any] = {}
        for item in manifest.items:
            value, memory = self.backend.new(item.dtype, item.shape)
            try:
                source_of(item).read_into(memory)
            except SourceError as error:
                if self._received_cb is not None:
                    raise TransferError(f"cannot read a tensor from {self._sender}: {error}") from error
                self._seen.clear()
                raise
            self._deliver(item.name, value, result)
        self.result = result

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
                raise ProtocolError(f"{self._sender} sent {name!r} twice")
            self._seen.add(name)
            if self._received_cb is None:
                result[name] = value
                return
            made = self._received_cb({name: value}, **self._cb_kwargs)
            if isinstance(made, dict):
                result.update(made)


class Sink(Protocol):
    """Takes the bytes of all tensors."""

    def write(self, offset: int, data: memoryview) -> None:
        """Take bytes of the run of all bytes."""

    def release_rest(self, offset: int) -> None:
        """Release the reservation for bytes at or after an offset; none of them has arrived, but they may later."""


class MemorySink:
    """Assembles ordinary tensors: each is allocated when its first bytes arrive, and nothing is concatenated.

    `deliver` runs with each value as soon as it is complete, on several threads at once.
    """

    def __init__(self, manifest: Manifest, backend: ArrayBackend, deliver: Callable[[str, Any], None]) -> None:
        self._manifest = manifest
        self._backend = backend
        self._deliver = deliver
        self._stored = [item for item in manifest.stored() if item.nbytes]
        self._starts = [item.offset for item in self._stored]
        self._lock = threading.Lock()
        self._made: dict[int, _PartialValue] = {}
        self._aliases: dict[int, list[ManifestItem]] = {}
        for item in manifest.items:
            if item.alias:
                self._aliases.setdefault(item.offset, []).append(item)

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes into the tensors they belong to."""
        index = bisect_right(self._starts, offset) - 1
        while data:
            item = self._stored[index]
            inside = offset - item.offset
            part = data[: item.nbytes - inside]
            self._fill(item, inside, part)
            data, offset, index = data[len(part) :], offset + len(part), index + 1

    def _fill(self, item: ManifestItem, inside: int, part: memoryview) -> None:
        with self._lock:
            made = self._made.get(item.offset)
            if made is None:
                self._made[item.offset] = made = _PartialValue(*self._backend.new(item.dtype, item.shape), item.nbytes)
        made.memory[inside : inside + len(part)] = part
        with self._lock:
            made.missing -= len(part)
            if made.missing:
                return
            del self._made[item.offset]
        for tied in self._aliases.get(item.offset, ()):
            # Separate tensors: a write to one must not change the other.
            value, memory = self._backend.new(tied.dtype, tied.shape)
            memory[:] = made.memory
            self._deliver(tied.name, value)
        self._deliver(item.name, made.value)

    def release_rest(self, offset: int) -> None:
        """Do nothing: a tensor takes memory when its first bytes arrive."""

    def finish(self) -> None:
        """Deliver the tensors without bytes."""
        for item in self._manifest.stored():
            if not item.nbytes:
                self._deliver(item.name, self._backend.new(item.dtype, item.shape)[0])


class _PartialValue:
    __slots__ = ("memory", "missing", "value")

    def __init__(self, value: Any, memory: memoryview, nbytes: int) -> None:
        self.value = value
        self.memory = memory
        self.missing = nbytes
