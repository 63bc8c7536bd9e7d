# SPDX-License-Identifier: Apache-2.0
"""Receivers that a cell sends to in vain: plain sockets that speak NVFlare's protocol and read nothing."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

import msgpack
from nvflare.fuel.f3.cellnet.defs import Encoding, MessageHeaderKey, MessageType
from nvflare.fuel.f3.sfm.constants import HandshakeKeys, Types
from nvflare.fuel.f3.sfm.prefix import PREFIX_LEN, Prefix

from nvflare_lazy.transport.segments import protocol
from tests.transport.peers import State

MIB = 1 << 20


class SilentReceiver:
    """A cell that sends requests, and does not read the answers after the handshake."""

    def __init__(self, port: int, name: str, receive_buffer: int | None = None) -> None:
        self.name = name
        self._receipts: list[bytes] = []
        self._socket = socket.socket()
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.settimeout(60)
        self._socket.connect(("127.0.0.1", port))
        hello = {HandshakeKeys.ENDPOINT_NAME: name, HandshakeKeys.TIMESTAMP: time.time()}
        self._send(Types.HELLO, 0, b"", msgpack.packb(hello))
        self.read_frame()  # the sender is ready

    def request(self, ref_id: str, start: int, count: int, **changes: Any) -> None:
        """Request a range of a payload of the server; `changes` are other headers of the message."""
        receipts, self._receipts = tuple(self._receipts), []
        fields = protocol.Request("a" * 32, ref_id, protocol.DATA, start, count, None, receipts).to_headers()
        headers = {
            MessageHeaderKey.CHANNEL: protocol.CHANNEL,
            MessageHeaderKey.TOPIC: protocol.REQUEST_TOPIC,
            MessageHeaderKey.ORIGIN: self.name,
            MessageHeaderKey.FROM_CELL: self.name,
            MessageHeaderKey.DESTINATION: "server",
            MessageHeaderKey.TO_CELL: "server",
            MessageHeaderKey.MSG_TYPE: MessageType.REQ,
            MessageHeaderKey.PAYLOAD_ENCODING: Encoding.NONE,
            **fields,
            **changes,
        }
        self._send(Types.DATA, 1, msgpack.packb(headers), b"")

    def send_data(self, transfer: str, start: int, data: bytes, origin: str) -> None:
        """Send bytes that the server has requested of another cell."""
        headers = {
            MessageHeaderKey.CHANNEL: protocol.CHANNEL,
            MessageHeaderKey.TOPIC: protocol.DATA_TOPIC,
            MessageHeaderKey.ORIGIN: origin,
            MessageHeaderKey.FROM_CELL: origin,
            MessageHeaderKey.DESTINATION: "server",
            MessageHeaderKey.TO_CELL: "server",
            MessageHeaderKey.MSG_TYPE: MessageType.REQ,
            MessageHeaderKey.PAYLOAD_ENCODING: Encoding.BYTES,
            **protocol.Data(transfer, start).to_headers(),
        }
        self._send(Types.DATA, 1, msgpack.packb(headers), data)

    def read_frame(self) -> None:
        """Read one frame after all; the next request returns its receipt."""
        frame = self._read(PREFIX_LEN)
        prefix = Prefix.from_bytes(frame)
        headers = self._read(prefix.length - PREFIX_LEN)[: prefix.header_len]
        fields = msgpack.unpackb(headers).get(protocol.KEY, {}) if headers else {}
        self._receipts += [fields["receipt"]] if "receipt" in fields else []

    def close(self) -> None:
        self._socket.close()

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._socket.recv(count - len(data))
            if not part:
                raise ConnectionError("closed by the sender")
            data += part
        return bytes(data)

    def _send(self, kind: int, app: int, headers: bytes, payload: bytes) -> None:
        frame = bytearray(PREFIX_LEN)
        length = PREFIX_LEN + len(headers) + len(payload)
        Prefix(length, len(headers), kind, 0, 0, app, 1, 1).to_buffer(frame, 0)
        self._socket.sendall(frame + headers + payload)


def tune_malloc(state: State) -> None:
    """Return each freed buffer, so that the process has only the memory that receivers hold."""
    from nvflare_lazy.transport import malloc_tuning

    malloc_tuning.tune_malloc(keep_buffers=False)


def offer_lazily(
    state: State, mib: int, num_receivers: int = 1, timeout: float = 600.0, receiver_ids: list[str] | None = None
) -> str:
    """Offer a tensor that is not in memory; return the reference."""
    import torch
    from nvflare.fuel.f3.streaming.obj_downloader import ObjectDownloader

    from nvflare_lazy.tensors.lazy_tensor import LazyTensor
    from nvflare_lazy.transport.tensor_downloader import TensorDownloadable
    from tests.transport.bad_senders import _Zeros

    values = {"T0": LazyTensor(_Zeros(mib * MIB), torch.uint8, (mib * MIB,))}
    downloader = ObjectDownloader(
        cell=state.cell, timeout=timeout, num_receivers=num_receivers, receiver_ids=receiver_ids
    )
    return downloader.add_object(TensorDownloadable(values, 2 * MIB, cell=state.cell))


def stop_after_requests(state: State) -> None:
    """Request all of the next payload at once, and then freeze this process."""
    from nvflare_lazy.transport import offload
    from nvflare_lazy.transport.segments import protocol
    from nvflare_lazy.transport.segments.client import SegmentDownload

    request_more = SegmentDownload._request_more

    def request_all(self: SegmentDownload) -> None:
        self._window.nbytes = 1 << 40
        request_more(self)
        if self._what == protocol.DATA:
            time.sleep(0.3)  # until the requests are sent
            os.kill(os.getpid(), signal.SIGSTOP)

    SegmentDownload._request_more = request_all
    offload.runtime.budget.resize(1 << 40)


def ask_in_vain(state: State, ref_id: str) -> int:
    """Send NVFlare's first request again and again until it is refused; return how often."""
    from nvflare.fuel.f3.cellnet.defs import ReturnCode
    from nvflare.fuel.f3.cellnet.utils import new_cell_message
    from nvflare.fuel.f3.streaming.download_service import OBJ_DOWNLOADER_CHANNEL, OBJ_DOWNLOADER_TOPIC

    for number in range(600):
        reply = state.cell.send_request(
            channel=OBJ_DOWNLOADER_CHANNEL,
            topic=OBJ_DOWNLOADER_TOPIC,
            target="server",
            request=new_cell_message({}, {"ref_id": ref_id}),
            timeout=30.0,
        )
        if reply.get_header(MessageHeaderKey.RETURN_CODE) != ReturnCode.OK:
            return number
        time.sleep(0.1)
    return 600


def use_number(state: State, number: str | None) -> None:
    """Give downloads a number that a test knows, or again one that cannot be guessed."""
    import uuid
    from types import SimpleNamespace

    from nvflare_lazy.transport.segments import client

    client.uuid = uuid if number is None else SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=number))


def bytes_sent(state: State, ref_id: str) -> int:
    """How many bytes of a payload NVFlare's transaction has counted."""
    from nvflare.fuel.f3.streaming.download_service import DownloadService

    return DownloadService._ref_table[ref_id].tx.get_total_bytes()


def unproven(state: State, receiver: str) -> int:
    """How many bytes this process has sent to a site without proof that they were read."""
    from nvflare_lazy.transport import offload
    from nvflare_lazy.transport.segments.server import SegmentServer

    site = offload.runtime.shared(SegmentServer)._unproven._sites.get(receiver)
    return 0 if site is None else site.nbytes


def is_offered(state: State, ref_id: str) -> bool:
    """Whether a payload is still there."""
    from nvflare.fuel.f3.streaming.download_service import DownloadService

    return ref_id in DownloadService._ref_table
