# SPDX-License-Identifier: Apache-2.0
"""Bytes that are still with their sender, read over the wire on use.

What makes a reference at a forwarding hop a tensor that a filter can look at, one at a time, without taking the rest.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.streaming.download_service import ProduceRC, request_download_chunk

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import PeerLostError, ProtocolError, SegmentTimeoutError
from nvflare_lazy.tensors.byte_source import ByteSource, MemorySource
from nvflare_lazy.transport import _nvflare_private, offload
from nvflare_lazy.transport.receive import RemotePayload
from nvflare_lazy.transport.segments import protocol
from nvflare_lazy.transport.segments.client import FIRST_NEWS_SECONDS, SegmentDownload

if TYPE_CHECKING:
    from nvflare_lazy.transport._backends import ArrayBackend

_ITEM_ID = re.compile("T([0-9]{1,9})")


class RemoteSource(ByteSource):
    """The bytes of one tensor of a payload at another cell that also has this package."""

    def __init__(self, remote: RemotePayload, item: str, nbytes: int) -> None:
        self._remote = remote
        self._item = item
        self.nbytes = nbytes

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        def write(at: int, data: memoryview) -> None:
            buffer[at : at + len(data)] = data

        SegmentDownload(
            self._remote,
            protocol.ITEM,
            len(buffer),
            write,
            item=self._item,
            start=offset,
            first_news=FIRST_NEWS_SECONDS,
        ).run()

    def describe(self) -> str:
        return f"{self._item} at {self._remote.from_fqcn}"


def open_remote(ref: Any, backend: ArrayBackend, cell: Any, timeout: float, abort_signal: Any) -> Any:
    """Return the tensor a reference points to, as a lazy one; without news for `timeout` seconds, it is lost."""
    remote = RemotePayload(offload.runtime, cell, ref.fqcn, ref.ref_id, timeout, ref.secure, abort=abort_signal)
    if ref.dtype is not None and ref.shape is not None:
        nbytes = backend.nbytes(ref.dtype, ref.shape)
        try:
            RemoteSource(remote, ref.item_id, nbytes).read(0, min(nbytes, 1))
        except SegmentTimeoutError:
            pass
        else:
            return backend.lazy(RemoteSource(remote, ref.item_id, nbytes), ref.dtype, ref.shape)
    return _whole_item(ref, backend, remote)


def _whole_item(ref: Any, backend: ArrayBackend, remote: RemotePayload) -> Any:
    """Download one item in NVFlare's form: all a sender without this package can do."""
    match = _ITEM_ID.fullmatch(ref.item_id)
    if match is None:
        raise ProtocolError(f"invalid name of an item: {quoted(ref.item_id)}")
    reply = request_download_chunk(
        from_fqcn=remote.from_fqcn,
        ref_id=remote.ref_id,
        # A count of zero items: the sender continues at this one.
        state={_nvflare_private.START: int(match[1]), _nvflare_private.COUNT: 0},
        per_request_timeout=remote.timeout,
        cell=remote.cell,
        abort_signal=remote.abort,
        secure=remote.secure,
    )
    code = reply.get_header(MessageHeaderKey.RETURN_CODE)
    payload = reply.payload
    if code != ReturnCode.OK or not isinstance(payload, dict):
        raise PeerLostError(f"{remote.from_fqcn} refused to send {ref.item_id}: {code}")
    items = payload.get(_nvflare_private.DATA)
    if payload.get(_nvflare_private.STATUS) != ProduceRC.OK or not isinstance(items, list) or not items:
        raise ProtocolError(f"{remote.from_fqcn} has no {ref.item_id}")
    for name, dtype, shape, data in backend.unpack_item(items[0], remote.from_fqcn):
        if name == ref.item_id:
            return backend.lazy(MemorySource(bytes(data)), dtype, shape)
    raise ProtocolError(f"{remote.from_fqcn} sent a different item than {ref.item_id}")
