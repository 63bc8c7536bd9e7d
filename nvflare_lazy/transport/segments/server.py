# SPDX-License-Identifier: Apache-2.0
"""The sender's side of segments: answers each request for a range of bytes, the receivers in turn.

A pool of threads answers the requests. NVFlare's threads, which deliver them, also carry the heartbeats; they must not
wait for a receiver on a slow line. The threads of the pool do not wait either: see `_send_limits`. A process ends
without joining them: NVFlare reports what else is still running at the end of a job, and then kills the process.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message

from nvflare_lazy._text import get_logger
from nvflare_lazy.errors import NVFlareLazyError, ProtocolError
from nvflare_lazy.transport import _nvflare_private
from nvflare_lazy.transport.segments import protocol
from nvflare_lazy.transport.segments._receipts import UnprovenData
from nvflare_lazy.transport.segments._send_limits import PausedReceivers, Send, SendBudget

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvflare_lazy.transport._downloadable import Payload

logger = get_logger(__name__)

_MAX_THREADS = 32
# Requests of one receiver in the queue: far more than its downloads have in flight. It has to repeat the others.
_MAX_WAITING = 256
# The same of all receivers, so that one which uses many names takes some megabytes and no more.
_MAX_WAITING_OF_ALL = 16 << 10
# How long a thread waits for a connection that is full. A separate thread watches the messages of slow lines.
_PATIENCE_SECONDS = 0.25


class SegmentServer:
    """All payloads that this process offers in segments."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._payloads: weakref.WeakValueDictionary[str, Payload] = weakref.WeakValueDictionary()
        self._cells: weakref.WeakSet[Any] = weakref.WeakSet()
        self._queues: dict[tuple[int, str], dict[protocol.Request, _Job]] = {}
        self._waiting = 0
        self._threads = SenderPool(_MAX_THREADS, "nvflare_lazy_send")
        self._budget = SendBudget()
        self._unproven = UnprovenData()
        self._paused = PausedReceivers()

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

    def prove(self, receiver: str, receipts: tuple[bytes, ...]) -> None:
        """Take the receipts that a receiver returns."""
        self._unproven.prove(receiver, receipts)

    def _take(self, message: Message, core: Any) -> None:
        requester = message.get_header(MessageHeaderKey.ORIGIN)
        try:
            request = protocol.Request.from_message(message)
        except ProtocolError as error:
            logger.warning("Ignored %s, from %s", error, requester)
            return
        self.prove(requester, request.receipts)
        job = _Job(core, requester, bool(message.get_header(MessageHeaderKey.SECURE, False)), request)
        key = (id(core), requester)
        with self._lock:
            queue = self._queues.get(key)
            # A repeated request that is still in the queue is answered once.
            if self._waiting >= _MAX_WAITING_OF_ALL or (
                queue is not None and (len(queue) >= _MAX_WAITING or request in queue)
            ):
                return
            self._waiting += 1
            if queue is not None:
                queue[request] = job
                return
            self._queues[key] = {request: job}
        self._threads.call(self._answer_next, key)

    def _answer_next(self, key: tuple[int, str]) -> None:
        """Answer one request of a receiver, then queue again, so that all receivers take turns."""
        while True:
            with self._lock:
                queue = self._queues[key]
                if not queue:
                    del self._queues[key]
                    return
                job = next(iter(queue.values()))
            send = Send(job.request.count, job.requester, _nvflare_private.connection_to(job.core, job.requester))
            if not self._begin(job, send):
                self._paused.call_when(
                    key, partial(self._may_send, job, send), partial(self._threads.call, self._answer_next, key)
                )
                return
            with self._lock:
                del queue[job.request]
                self._waiting -= 1
                crowded = len(self._queues) > _MAX_THREADS
            sent = False
            try:
                sent = self._answer(job)
                _nvflare_private.hand_over(send.connection)
            except Exception:
                logger.exception("Cannot answer %s", job.requester)
            finally:
                self._budget.release(send)
                if not sent:
                    self._unproven.discard(job.requester, job.receipt)
            del job
            if crowded:
                self._threads.call(self._answer_next, key)
                return

    def _begin(self, job: _Job, send: Send) -> bool:
        """Wait a little until a request may be answered; false if it may not."""
        receipt = self._unproven.add(job.requester, job.request.transfer, job.request.count)
        if receipt is None:
            return False
        job.receipt = receipt
        if _nvflare_private.has_room(send.connection, _PATIENCE_SECONDS) and self._budget.acquire(
            send, _PATIENCE_SECONDS
        ):
            return True
        self._unproven.discard(job.requester, receipt)
        return False

    def _may_send(self, job: _Job, send: Send) -> bool:
        return (
            self._unproven.permits(job.requester, job.request.transfer, job.request.count)
            and _nvflare_private.has_room(send.connection, 0)
            and self._budget.permits(send)
        )

    def _answer(self, job: _Job) -> bool:
        """Answer a request; return whether the answer was sent."""
        request = job.request
        with _nvflare_private.serving(request.ref_id) as ref:
            payload = None if ref is None else self._payloads.get(request.ref_id)
            if ref is None or payload is None:
                return job.refuse("payload already released: the transfer completed or timed out")
            try:
                data = _read(payload, request)
            except NVFlareLazyError as error:
                return job.refuse(str(error))
            except Exception as error:
                logger.exception("Cannot read the data that %s requests", job.requester)
                return job.refuse(f"{type(error).__name__}: {error}")
            if not job.send(data):
                return False
            _nvflare_private.record_sent(ref, job.requester, len(data))
            patience = _nvflare_private.patience_for(request.ref_id, job.requester)
            if patience is not None and payload.progress.sent(job.requester, *_range_of(payload, request), patience):
                _nvflare_private.record_activity(ref, job.requester)
            return True


def _range_of(payload: Payload, request: protocol.Request) -> tuple[int, int]:
    """Return where a request is in the payload's bytes; its manifest comes after them."""
    start = request.start
    if request.what == protocol.ITEM and request.item is not None:
        start += payload.offset_of(request.item)
    elif request.what == protocol.MANIFEST:
        start += payload.manifest.nbytes
    return start, start + request.count


def _read(payload: Payload, request: protocol.Request) -> bytearray | memoryview:
    if request.what == protocol.DATA:
        return payload.read(request.start, request.count)
    if request.what == protocol.ITEM and request.item is not None:
        return payload.read_item(request.item, request.start, request.count)
    if request.what == protocol.MANIFEST:
        return memoryview(payload.encoded_manifest)[request.start : request.start + request.count]
    raise ProtocolError(f"unknown kind of request: {request.what!r}")


class _Job:
    """One request, and the route to its receiver; with the receipt of its answer, once that is sent."""

    __slots__ = ("core", "receipt", "request", "requester", "secure")

    def __init__(self, core: Any, requester: str, secure: bool, request: protocol.Request) -> None:
        self.core = core
        self.requester = requester
        self.secure = secure
        self.request = request
        self.receipt = b""

    def send(self, data: bytearray | memoryview | None, error: str | None = None) -> bool:
        headers = protocol.Data(self.request.transfer, self.request.start, error, self.receipt).to_headers()
        errors = self.core.fire_and_forget(
            protocol.CHANNEL,
            protocol.DATA_TOPIC,
            self.requester,
            Message(headers, data),
            secure=self.secure,
            optional=True,
        )
        return not errors.get(self.requester)

    def refuse(self, reason: str) -> bool:
        logger.info("Refused a request of %s: %s", self.requester, reason)
        return self.send(None, reason)


# Longer than the pauses between two segments of a transfer, and short enough that an idle process has no threads.
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
            del function, args  # the sent data is not held until the next call
