# SPDX-License-Identifier: Apache-2.0
"""The sender's side of a download: `Payload`, and the object through which NVFlare's protocol serves it.

Each request names the bytes it needs. The sender only notes which ranges a receiver was sent, to decide whether the
payload is still needed: a receiver that is far behind, or repeats a request, costs no more memory.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.streaming.cacheable import CacheableObject
from nvflare.fuel.f3.streaming.download_service import DownloadStatus, ProduceRC

from nvflare_lazy.errors import PeerLostError, ProtocolError
from nvflare_lazy.records import TransferRecord
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.transport import _nvflare_private, offload, ways
from nvflare_lazy.transport._receiver_progress import ReceiverProgress
from nvflare_lazy.transport.handoff import wire
from nvflare_lazy.transport.segments import manifest as manifests
from nvflare_lazy.transport.segments import protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvflare_lazy.tensors.byte_source import ByteSource
    from nvflare_lazy.tensors.tensor_file import TensorFile
    from nvflare_lazy.transport._backends import ArrayBackend
    from nvflare_lazy.transport._flow_control import Slot
    from nvflare_lazy.transport.offload import TransferRuntime


class PayloadDownloadable(CacheableObject):
    """Named values of one backend, to be downloaded by any number of receivers.

    Tensors that together stay below `max_chunk_size` go in one message to a receiver without this package. Requests for
    segments are answered on `cell`; without it, no segments are offered. It uses NVFlare's base class without its
    cache.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        max_chunk_size: int,
        backend: ArrayBackend,
        cell: Any = None,
        runtime: TransferRuntime | None = None,
    ) -> None:
        self._payload = Payload(values, backend)
        self.keys = self._payload.names
        super().__init__(values, max_chunk_size)
        self._cell = cell
        self._runtime = runtime or offload.runtime
        self._ref_id: str | None = None
        self._slots: dict[str, Slot] = {}
        self._passed_on_by: str | None = None
        # When each receiver has started, and the way of transport of each receiver that has the payload.
        self._began: dict[str, float] = {}
        self._ways: dict[str, str] = {}

    def set_transaction(self, tx_id: str, ref_id: str) -> None:
        """Start to answer requests for segments."""
        self._ref_id = ref_id
        if self._cell is not None:
            for way in ways.WAYS:
                way.serve(self._payload, ref_id, self._cell, self._runtime)

    def get_item_count(self) -> int:
        """Return the number of tensors."""
        return len(self._payload.names)

    def get_item_size(self, index: int) -> int | None:
        """Return about how many bytes an item has, without making it; None after `release()`."""
        return None if self._payload.released else self._payload.nvflare_item_nbytes(index)

    def produce_item(self, index: int) -> bytes:
        """Return one tensor in the form that NVFlare's own receivers take."""
        return bytes(self._payload.nvflare_item(index))

    def produce(self, state: dict[str, Any] | None, requester: str) -> tuple[str, Any, dict[str, Any]]:
        """Answer one request in NVFlare's protocol; see `Downloadable`."""
        start = 0
        self._began.setdefault(requester, time.monotonic())
        if state:
            start = _count(state.get(_nvflare_private.START, 0)) + _count(state.get(_nvflare_private.COUNT, 0))
        answer = self._answer(state, requester) if state else None
        self._note_request(requester, start if state else -1)
        if answer is not None:
            return ProduceRC.OK, [], answer
        if not state and self._ref_id is not None and self._cell is not None:
            # No items, and more keys in the state: a receiver without this package returns both and starts at item 0.
            offers: dict[str, Any] = {}
            for way in ways.WAYS:
                for key, value in way.offer(self._payload, self._ref_id, self._runtime).items():
                    offers[key] = {**offers[key], **value} if key in offers else value
            if offers:
                return ProduceRC.OK, [], {_nvflare_private.START: 0, _nvflare_private.COUNT: 0, **offers}
        if start >= self.size:
            self._ways.setdefault(requester, ways.stated_way(state))
            self._runtime.throttle.release(self._slots.pop(requester, None))
            return ProduceRC.EOF, None, {}
        self._ways[requester] = ways.AS_ITEMS
        # The receiver has the previous items, or it would not ask for more.
        before = self._slots.get(requester)
        self._slots[requester] = self._runtime.throttle.acquire(self._payload.nvflare_item_nbytes(start), after=before)
        items = [self._payload.nvflare_item(start)]
        total = len(items[0])
        while start + len(items) < self.size:
            total += self._payload.nvflare_item_nbytes(start + len(items))
            if total >= self.max_chunk_size:
                break
            items.append(self._payload.nvflare_item(start + len(items)))
        return ProduceRC.OK, items, {_nvflare_private.START: start, _nvflare_private.COUNT: len(items)}

    def _answer(self, state: dict[str, Any], requester: str) -> dict[str, Any] | None:
        """Pass a request to each way of transport, and return the state of the reply that one of them made."""
        ref_id = self._ref_id
        if wire.is_for_all(state.get(protocol.KEY)) and FQCN.is_ancestor(requester, self._sender):
            self._passed_on_by = requester
        answers = [] if ref_id is None else [way.answer(state, ref_id, requester, self._runtime) for way in ways.WAYS]
        return next((answer for answer in answers if answer is not None), None)

    def _note_request(self, requester: str, item: int) -> None:
        """Keep the transaction alive only for a receiver that asks for more than before."""
        if self._ref_id is None:
            return
        nbytes = self._payload.nvflare_item_nbytes(item) if 0 <= item < self.size else 0
        patience = _nvflare_private.patience_for(self._ref_id, requester, self._sender)
        if patience is None or not self._payload.progress.reached(requester, min(item, self.size), nbytes, patience):
            _nvflare_private.revoke_activity(self._ref_id, _last_progress)

    @property
    def _sender(self) -> str:
        """The name of this process's cell; empty without one."""
        return "" if self._cell is None else self._cell.core_cell.my_info.fqcn

    def downloaded_to_one(self, to_receiver: str, status: str) -> None:
        """Count a download for others: for a forwarding hop whose trainer received the payload, or for all receivers.

        The latter only if the receiver is the client job of this process, and passes the payload on from its scratch.
        """
        self._record_sent(to_receiver, status)
        if self._ref_id is None:
            return
        _nvflare_private.finish_for_ancestor(self._ref_id, to_receiver, status)
        if to_receiver == self._passed_on_by:
            _nvflare_private.finish_for_all(self._ref_id, status)

    def _record_sent(self, receiver: str, status: str) -> None:
        began = self._began.pop(receiver, None)
        way = self._ways.pop(receiver, "")
        if began is None or status != DownloadStatus.SUCCESS or self._payload.released:
            return
        seconds = round(time.monotonic() - began, 3)
        nbytes = self._payload.manifest.nbytes
        self._runtime.record_transfer(
            TransferRecord(direction="sent", peer=receiver, nbytes=nbytes, seconds=seconds, way=way)
        )

    def downloaded_to_all(self) -> None:
        """Do nothing: nothing is cached."""

    def transaction_done(self, transaction_id: str, status: str) -> None:
        """Answer no more requests."""
        self.clear_cache()
        if self._ref_id is not None:
            for way in ways.WAYS:
                way.withdraw(self._ref_id, self._runtime)

    def release(self) -> None:
        """Release the tensors."""
        self._payload.release()
        self.base_obj = None


def _last_progress(downloadable: Any) -> float | None:
    return downloadable._payload.progress.last if isinstance(downloadable, PayloadDownloadable) else None


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"invalid download state: {value!r}")
    return value


class Payload:
    """Named tensors or arrays, to be served by parts."""

    def __init__(self, values: Mapping[str, Any], backend: ArrayBackend) -> None:
        self.names = list(values)
        self.backend = backend
        self.progress = ReceiverProgress()
        self._values: Mapping[str, Any] | None = values
        self._lock = threading.Lock()
        self._manifest: manifests.Manifest | None = None
        self._encoded = b""
        self._stored: list[manifests.ManifestItem] = []
        self._starts: list[int] = []
        self._offsets: dict[str, int] | None = None
        # The source of the last tensor that was read: some are expensive to make, and requests arrive in order.
        self._last: tuple[str, ByteSource] | None = None

    def release(self) -> None:
        """Release the tensors."""
        self._values = None
        self._last = None

    @property
    def released(self) -> bool:
        """Whether the tensors were released."""
        return self._values is None

    @property
    def manifest(self) -> manifests.Manifest:
        """Names, types, shapes and offsets."""
        with self._lock:
            if self._manifest is None:
                values = self._held()
                self._manifest = manifests.lay_out(
                    (name, *self._described(values[name]), self.backend.identity(values[name])) for name in self.names
                )
                self._stored = [item for item in self._manifest.stored() if item.nbytes]
                self._starts = [item.offset for item in self._stored]
            return self._manifest

    def _described(self, value: Any) -> tuple[Any, tuple[int, ...], int]:
        dtype, shape = self.backend.describe(value)
        return dtype, shape, self.backend.nbytes(dtype, shape)

    @property
    def encoded_manifest(self) -> bytes:
        """The manifest for the wire."""
        manifest = self.manifest
        with self._lock:
            self._encoded = self._encoded or manifests.encode(manifest, self.backend)
            return self._encoded

    # NVFlare copies the data into a frame: from a bytearray at once, from anything else through a bytearray.

    def read(self, start: int, count: int) -> bytearray | memoryview:
        """Return a part of the payload's bytes; a view of the sender's own memory where that is possible."""
        manifest = self.manifest
        if start < 0 or count < 0 or start + count > manifest.nbytes:
            raise ProtocolError(f"invalid request for bytes {start} to {start + count} of {manifest.nbytes}")
        index = bisect_right(self._starts, start) - 1
        item = self._stored[index]
        if start + count <= item.offset + item.nbytes:
            return self._part(item.name, start - item.offset, count)
        gathered = bytearray(count)
        view = memoryview(gathered)
        done = 0
        while done < count:
            item = self._stored[index]
            inside = start + done - item.offset
            take = min(count - done, item.nbytes - inside)
            self._source(item.name).read_into(view[done : done + take], inside)
            done, index = done + take, index + 1
        return gathered

    def read_item(self, name: str, start: int, count: int) -> bytearray | memoryview:
        """Return a part of one tensor's bytes."""
        if name not in self._held():
            raise ProtocolError(f"unknown item {name!r} of this payload")
        source = self._source(name)
        if start < 0 or count < 0 or start + count > source.nbytes:
            raise ProtocolError(f"invalid request for bytes {start} to {start + count} of {source.nbytes} of {name!r}")
        return self._part(name, start, count)

    def place_of(self, name: str) -> tuple[TensorFile, int] | None:
        """Return the open file and the offset at which it contains a tensor's bytes, or None."""
        return self.backend.source(self._held()[name]).file_range()

    def offset_of(self, name: str) -> int:
        """Return where a tensor begins in the payload's bytes."""
        if self._offsets is None:
            self._offsets = {item.name: item.offset for item in self.manifest.items}
        return self._offsets[name]

    def nvflare_item(self, index: int) -> bytearray | memoryview:
        """Return one tensor in the form that NVFlare's own receivers take: whole."""
        name = self.names[index]
        return self.backend.pack_item(name, self._held()[name], self._source(name))

    def nvflare_item_nbytes(self, index: int) -> int:
        """Return about how long that is, without making it."""
        return self._described(self._held()[self.names[index]])[2]

    def _part(self, name: str, start: int, count: int) -> bytearray | memoryview:
        source = self._source(name)
        if isinstance(source, MemorySource):
            return source.view[start : start + count]
        return source.read(start, count)

    def _source(self, name: str) -> ByteSource:
        last = self._last
        if last is not None and last[0] == name:
            return last[1]
        source = self.backend.source(self._held()[name])
        if self._values is not None:
            self._last = (name, source)
        return source

    def _held(self) -> Mapping[str, Any]:
        values = self._values
        if values is None:
            raise PeerLostError("payload already released: the transfer completed or timed out")
        return values
