# SPDX-License-Identifier: Apache-2.0
"""A cell without a network: its only peer is a script in the same process, which may send anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.download_service import ProduceRC

from nvflare_lazy.transport import _nvflare_private
from nvflare_lazy.transport.segments import manifest as manifests
from nvflare_lazy.transport.segments import protocol

SENDER = "site-1"


class Sender:
    """Offers a payload in segments as this package does; a test can change any answer."""

    def __init__(self, encoded: bytes = b"", data: bytes = b"", items: int = 0, nbytes: int | None = None) -> None:
        self.encoded = encoded
        self.data = data
        nbytes = len(data) if nbytes is None else nbytes
        self.offer: Any = protocol.Offer(items, nbytes, len(encoded)).to_state()
        self.requests = 0
        self.asked_for: set[str] = set()

    @classmethod
    def of(cls, values: dict[str, Any], backend: Any) -> Sender:
        """Return the sender of these values."""
        described = []
        parts = []
        for name, value in values.items():
            dtype, shape = backend.describe(value)
            source = backend.source(value)
            described.append((name, dtype, shape, source.nbytes, None))
            parts.append(source.read(0, source.nbytes))
        manifest = manifests.lay_out(described)
        return cls(manifests.encode(manifest, backend), b"".join(parts), len(values))

    def replies(self) -> Iterator[dict[str, Any]]:
        """What it answers to NVFlare's requests, in order; after that, the end."""
        state = {"start": 0, "count": 0, protocol.KEY: self.offer}
        yield {_nvflare_private.STATUS: ProduceRC.OK, _nvflare_private.DATA: [], _nvflare_private.STATE: state}

    def on_request(self, fields: dict[str, Any], take: Callable[[Any, Any], None]) -> str | None:
        """Answer a request for a segment with `take(headers, payload)`; return an error if it cannot be sent."""
        self.requests += 1
        self.asked_for.add(fields["what"])
        source = self.encoded if fields["what"] == protocol.MANIFEST else self.data
        data = memoryview(source)[fields["at"] : fields["at"] + fields["n"]]
        take(protocol.Data(fields["to"], fields["at"]).to_headers(), data)
        return None


class ItemSender(Sender):
    """Sends items in NVFlare's form, one for each request."""

    def __init__(self, items: Iterator[Any] | list[Any]) -> None:
        super().__init__()
        self._items = items

    def replies(self) -> Iterator[dict[str, Any]]:
        for index, item in enumerate(self._items):
            yield {
                _nvflare_private.STATUS: ProduceRC.OK,
                _nvflare_private.DATA: item if isinstance(item, list) else [item],
                _nvflare_private.STATE: {"start": index, "count": 1},
            }


class FakeCell:
    """What a receiver uses of a cell; `connect` chooses the peer."""

    def __init__(self, fqcn: str = "server.job") -> None:
        self.core_cell = _FakeCore(fqcn)
        self._replies: Iterator[dict[str, Any]] = iter(())
        self._last: tuple[Any, dict[str, Any]] | None = None

    def connect(self, sender: Sender) -> None:
        self.core_cell.sender = sender
        self._replies = sender.replies()

    def get_fqcn(self) -> str:
        return self.core_cell.my_info.fqcn

    def register_request_cb(self, **_: Any) -> None:
        pass

    def fire_and_forget(self, **_: Any) -> None:
        pass

    def send_request(self, **_: Any) -> Message:
        end = {_nvflare_private.STATUS: ProduceRC.EOF}
        return Message({MessageHeaderKey.RETURN_CODE: ReturnCode.OK}, next(self._replies, end))


class _FakeCore:
    def __init__(self, fqcn: str) -> None:
        self.my_info = SimpleNamespace(fqcn=fqcn)
        self.sender = Sender()
        self._callbacks: dict[str, Callable[[Message], None]] = {}

    def register_request_cb(self, channel: str, topic: str, cb: Callable[..., None], *args: Any) -> None:
        self._callbacks[topic] = lambda message: cb(message, *args)

    def fire_and_forget(self, channel: str, topic: str, target: str, message: Message, **_: Any) -> dict[str, Any]:
        def take(headers: Any, payload: Any, origin: Any = SENDER) -> None:
            headers = headers if isinstance(headers, dict) else {}
            self._callbacks[protocol.DATA_TOPIC](Message({**headers, MessageHeaderKey.ORIGIN: origin}, payload))

        error = self.sender.on_request(message.get_header(protocol.KEY), take)
        return {} if error is None else {target: error}
