# SPDX-License-Identifier: Apache-2.0
"""Receivers that a cell sends to in vain: plain sockets that speak NVFlare's protocol and read nothing."""

from __future__ import annotations

import socket
import struct
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
    """A cell that requests, and does not read what it is sent after the handshake."""

    def __init__(self, port: int, name: str, receive_buffer: int | None = None) -> None:
        self.name = name
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
        fields = protocol.Request("a" * 32, ref_id, protocol.DATA, start, count).to_headers()
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

    def read_frame(self) -> bytes:
        """Read one frame after all."""
        (length,) = struct.unpack(">I", self._read(4))
        return self._read(length - 4)

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


def offer_lazily(state: State, mib: int, num_receivers: int = 1, timeout: float = 600.0) -> str:
    """Offer a tensor that is not in memory; return the reference."""
    import torch
    from nvflare.fuel.f3.streaming.obj_downloader import ObjectDownloader

    from nvflare_lazy.tensors.lazy_tensor import LazyTensor
    from nvflare_lazy.transport.tensor_downloader import TensorDownloadable
    from tests.transport.bad_senders import _Zeros

    values = {"T0": LazyTensor(_Zeros(mib * MIB), torch.uint8, (mib * MIB,))}
    downloader = ObjectDownloader(cell=state.cell, timeout=timeout, num_receivers=num_receivers)
    return downloader.add_object(TensorDownloadable(values, 2 * MIB, cell=state.cell))


def requests_waiting(state: State) -> int:
    """How many requests wait for an answer."""
    from nvflare_lazy.transport import offload
    from nvflare_lazy.transport.segments.server import SegmentServer

    return sum(len(queue) for queue in offload.runtime.shared(SegmentServer)._queues.values())


def is_offered(state: State, ref_id: str) -> bool:
    """Whether a payload is still there."""
    from nvflare.fuel.f3.streaming.download_service import DownloadService

    return ref_id in DownloadService._ref_table
