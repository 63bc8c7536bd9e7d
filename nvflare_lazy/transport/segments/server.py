# SPDX-License-Identifier: Apache-2.0
"""The sender's side of segments: answers each request for a range of bytes, and keeps no state per receiver.

A pool of threads answers the requests. NVFlare's threads, which deliver them, also carry the heartbeats; they must not
wait for a receiver on a slow line. A process ends without joining them: NVFlare reports what else is still running
at the end of a job, and then ends the process the hard way.
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
from nvflare_lazy.transport import _nvflare_private
from nvflare_lazy.transport.segments import protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvflare_lazy.transport._downloadable import Payload

logger = logging.getLogger(__name__)

_MAX_THREADS = 32
# Requests of one receiver in the queue: far more than its downloads have in flight. It has to repeat the others.
_MAX_WAITING = 1024


class SegmentServer:
    """All payloads that this process offers in segments."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._payloads: weakref.WeakValueDictionary[str, Payload] = weakref.WeakValueDictionary()
        self._cells: weakref.WeakSet[Any] = weakref.WeakSet()
        self._queues: dict[tuple[int, str], deque[_Job]] = {}
        self._threads = SenderPool(_MAX_THREADS, "nvflare_lazy_send")

    def offer(self, ref_id: str, payload: Payload) -> None:
        """Answer requests for this payload; it is not kept alive."""
        with self._lock:
            self._payloads[ref_id] = payload

    def withdraw(self, ref_id: str) -> None:
        """Answer no more requests for it."""
        with self._lock:
            self._payloads.pop(ref_id, None)

    def listen(self, cell: Any) -> None:
        """Receive requests at this cell."""
        core = cell.core_cell
        with self._lock:
            if core in self._cells:
                return
            self._cells.add(core)
        core.register_request_cb(protocol.CHANNEL, protocol.REQUEST_TOPIC, self._take, core)

    def _take(self, message: Message, core: Any) -> None:
        requester = message.get_header(MessageHeaderKey.ORIGIN)
        try:
            request = protocol.Request.from_message(message)
        except ProtocolError as error:
            logger.warning("ignored %s, from %s", error, requester)
            return
        job = _Job(core, requester, bool(message.get_header(MessageHeaderKey.SECURE, False)), request)
        key = (id(core), requester)
        with self._lock:
            queue = self._queues.get(key)
            if queue is not None:
                # A repeated request that is still in the queue is answered once.
                if len(queue) < _MAX_WAITING and all(waiting.request != request for waiting in queue):
                    queue.append(job)
                return
            self._queues[key] = deque([job])
        self._threads.call(self._answer_next, key)

    def _answer_next(self, key: tuple[int, str]) -> None:
        """Answer one request of a receiver, then queue again, so that all receivers take turns."""
        while True:
            with self._lock:
                queue = self._queues[key]
                if not queue:
                    del self._queues[key]
                    return
                job = queue.popleft()
                crowded = len(self._queues) > _MAX_THREADS
            try:
                self._answer(job)
            except Exception:
                logger.exception("cannot answer %s", job.requester)
            if crowded:
                self._threads.call(self._answer_next, key)
                return

    def _answer(self, job: _Job) -> None:
        request = job.request
        with _nvflare_private.serving(request.ref_id, job.requester) as ref:
            payload = None if ref is None else self._payloads.get(request.ref_id)
            if ref is None or payload is None:
                job.refuse("payload already released: the transfer completed or timed out")
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
                _nvflare_private.record_sent(ref, job.requester, len(data))


def _read(payload: Payload, request: protocol.Request) -> bytearray | memoryview:
    if request.what == protocol.DATA:
        return payload.read(request.start, request.count)
    if request.what == protocol.ITEM and request.item is not None:
        return payload.read_item(request.item, request.start, request.count)
    if request.what == protocol.MANIFEST:
        return memoryview(payload.encoded_manifest)[request.start : request.start + request.count]
    raise ProtocolError(f"unknown kind of request: {request.what!r}")


class _Job:
    """One request, and the way back to its receiver."""

    __slots__ = ("core", "request", "requester", "secure")

    def __init__(self, core: Any, requester: str, secure: bool, request: protocol.Request) -> None:
        self.core = core
        self.requester = requester
        self.secure = secure
        self.request = request

    def send(self, data: bytearray | memoryview | None, error: str | None = None) -> bool:
        headers = protocol.Data(self.request.transfer, self.request.start, error).to_headers()
        errors = self.core.fire_and_forget(
            protocol.CHANNEL,
            protocol.DATA_TOPIC,
            self.requester,
            Message(headers, data),
            secure=self.secure,
            optional=True,
        )
        return not errors.get(self.requester)

    def refuse(self, reason: str) -> None:
        logger.info("refused a request of %s: %s", self.requester, reason)
        self.send(None, reason)


# Longer than the pauses between two segments of a transfer, and short enough that a process at rest has none.
_LINGER_SECONDS = 5.0


class SenderPool:
    """Calls functions on a few threads."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._changed = threading.Condition()
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._idle = 0
        self._count = 0

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Have a function called as soon as a thread is free; it must not raise."""
        with self._changed:
            self._calls.append((function, args))
            if self._idle >= len(self._calls):
                self._changed.notify()
            elif self._count < self._most:
                threading.Thread(target=self._run, name=f"{self._name}_{self._count}", daemon=True).start()
                self._count += 1

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._calls, _LINGER_SECONDS)
                self._idle -= 1
                if not self._calls:
                    self._count -= 1
                    return
                function, args = self._calls.popleft()
            function(*args)
            del function, args  # what was sent is not held until the next call
