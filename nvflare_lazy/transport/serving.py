# SPDX-License-Identifier: Apache-2.0
"""The sender's end of segments: answers each request for a range of bytes with that range, and remembers nothing.

Requests are answered by a few threads of our own. NVFlare's, which deliver them, also carry the heartbeats; they must
not wait for a receiver on a slow line.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message

from nvflare_lazy.errors import NVFlareLazyError, ProtocolError
from nvflare_lazy.transport import nvflare_private, wire
from nvflare_lazy.transport.sending_threads import SendingThreads

if TYPE_CHECKING:
    from nvflare_lazy.transport.payload import Payload

logger = logging.getLogger(__name__)

_MOST_THREADS = 32
# Requests of one receiver in line: far more than its downloads have under way. The others it has to ask for again.
_MOST_WAITING = 1024


class SegmentServer:
    """All payloads that this process offers in segments."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._payloads: weakref.WeakValueDictionary[str, Payload] = weakref.WeakValueDictionary()
        self._cells: weakref.WeakSet[Any] = weakref.WeakSet()
        self._queues: dict[tuple[int, str], deque[_Job]] = {}
        self._threads = SendingThreads(_MOST_THREADS, "nvflare_lazy_send")

    def offer(self, ref_id: str, payload: Payload) -> None:
        """Answer requests for this payload from now on, as long as somebody else keeps it."""
        with self._lock:
            self._payloads[ref_id] = payload

    def withdraw(self, ref_id: str) -> None:
        """Answer no more requests for it."""
        with self._lock:
            self._payloads.pop(ref_id, None)

    def listen(self, cell: Any) -> None:
        """Take requests that come to this cell."""
        core = cell.core_cell
        with self._lock:
            if core in self._cells:
                return
            self._cells.add(core)
        core.register_request_cb(wire.CHANNEL, wire.REQUEST_TOPIC, self._take, core)

    def _take(self, message: Message, core: Any) -> None:
        requester = message.get_header(MessageHeaderKey.ORIGIN)
        try:
            request = wire.Request.from_message(message)
        except ProtocolError as error:
            logger.warning("ignored %s, from %s", error, requester)
            return
        job = _Job(core, requester, bool(message.get_header(MessageHeaderKey.SECURE, False)), request)
        key = (id(core), requester)
        with self._lock:
            queue = self._queues.get(key)
            if queue is not None:
                # Whoever asks again for what is still in line gets it once.
                if len(queue) < _MOST_WAITING and all(waiting.request != request for waiting in queue):
                    queue.append(job)
                return
            self._queues[key] = deque([job])
        self._threads.call(self._answer_next, key)

    def _answer_next(self, key: tuple[int, str]) -> None:
        """Answer one request of a receiver, then stand in line again: nobody is served before the others."""
        while True:
            with self._lock:
                queue = self._queues[key]
                if not queue:
                    del self._queues[key]
                    return
                job = queue.popleft()
                crowded = len(self._queues) > _MOST_THREADS
            try:
                self._answer(job)
            except Exception:
                logger.exception("cannot answer %s", job.requester)
            if crowded:
                self._threads.call(self._answer_next, key)
                return

    def _answer(self, job: _Job) -> None:
        request = job.request
        with nvflare_private.serving(request.ref_id, job.requester) as ref:
            payload = None if ref is None else self._payloads.get(request.ref_id)
            if ref is None or payload is None:
                job.refuse("the tensors are not there any more: their transfer is over, or timed out")
                return
            try:
                data = _read(payload, request)
            except NVFlareLazyError as error:
                job.refuse(str(error))
                return
            except Exception as error:
                logger.exception("cannot read what %s asks for", job.requester)
                job.refuse(f"{type(error).__name__}: {error}")
                return
            if job.send(data):
                nvflare_private.note_sent(ref, job.requester, len(data))


def _read(payload: Payload, request: wire.Request) -> bytearray | memoryview:
    if request.what == wire.DATA:
        return payload.read(request.start, request.count)
    if request.what == wire.ITEM and request.item is not None:
        return payload.read_item(request.item, request.start, request.count)
    if request.what == wire.MANIFEST:
        return memoryview(payload.encoded_manifest)[request.start : request.start + request.count]
    raise ProtocolError(f"{request.what!r} was asked for, which this release does not know")


class _Job:
    """One request, and the way back to who sent it."""

    __slots__ = ("core", "request", "requester", "secure")

    def __init__(self, core: Any, requester: str, secure: bool, request: wire.Request) -> None:
        self.core = core
        self.requester = requester
        self.secure = secure
        self.request = request

    def send(self, data: bytearray | memoryview | None, error: str | None = None) -> bool:
        headers = wire.Data(self.request.transfer, self.request.start, error).to_headers()
        errors = self.core.fire_and_forget(
            wire.CHANNEL, wire.DATA_TOPIC, self.requester, Message(headers, data), secure=self.secure, optional=True
        )
        return not errors.get(self.requester)

    def refuse(self, reason: str) -> None:
        logger.info("refused a request of %s: %s", self.requester, reason)
        self.send(None, reason)
