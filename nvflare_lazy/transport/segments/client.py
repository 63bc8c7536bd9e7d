# SPDX-License-Identifier: Apache-2.0
"""The receiver's side of segments: keeps several requests in flight and writes each segment on arrival.

The threads in which NVFlare delivers pieces write them, without a queue. A piece that was not requested is ignored. A
lost piece is requested again.
"""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message

from nvflare_lazy.errors import PeerLostError, ProtocolError, SegmentTimeoutError
from nvflare_lazy.transport.segments import protocol
from nvflare_lazy.transport.segments._receipts import ReceiptsToReturn
from nvflare_lazy.transport.segments._window import Window

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvflare_lazy.transport.receive import RemotePayload

# Bytes one download may have in flight on a short line, including bytes that are being written, within the budget of
# the process.
WINDOW_BYTES = 8 << 20
# How often each of them is in memory here: in the frame that NVFlare read, and in the message that it cut out of it.
_COPIES = 2
# How often a download that waits looks at its abort signal.
_POLL_SECONDS = 0.1
# A sender that has just answered through NVFlare answers a request for a segment at once, if it gets there.
FIRST_NEWS_SECONDS = 15.0
# The first request for data, if no request was answered before: even a very slow line brings the answer in time.
_FIRST_BYTES = 16 << 10
# After this time without news, bytes in flight no longer count in the budget: a sender that stalls would take it
# from the others.
_STALL_SECONDS = 3.0
# After this time it is requested again, and then less and less often: on a slow line it is still in flight, and a
# request would only make the line slower.
_RETRY_SECONDS = 30.0
_MAX_RETRY_SECONDS = 120.0
# A sender to which requests cannot even be sent is given up sooner than a silent one. NVFlare restores a lost
# connection, and tries that every 10 s at least.
_UNREACHABLE_SECONDS = 120.0
_RESEND_SECONDS = 1.0
# The most that counts of the time between two looks at the clock. A longer time is a pause of this process, not silence
# of the sender: the answers may wait in the socket.
_MAX_TICK_SECONDS = 1.0
# A download that receives less than this in this time keeps no disk space for the rest: a sender that offers a large
# payload and then stalls would take the space from the others.
_MIN_PROGRESS_BYTES = 8 << 20
_PROGRESS_SECONDS = 30.0


class Inbox:
    """The downloads of this process by number, for incoming data; and the receipts of all data, late data included."""

    def __init__(self) -> None:
        self.receipts = ReceiptsToReturn()
        self._lock = threading.Lock()
        self._downloads: dict[str, SegmentDownload] = {}
        self._cells: weakref.WeakSet[Any] = weakref.WeakSet()

    def open(self, download: SegmentDownload) -> str:
        """Return the number that data for this download has to carry."""
        number = uuid.uuid4().hex
        core = download.remote.cell.core_cell
        with self._lock:
            self._downloads[number] = download
            if core in self._cells:
                return number
            self._cells.add(core)
        core.register_request_cb(protocol.CHANNEL, protocol.DATA_TOPIC, self._take, core.my_info.fqcn)
        return number

    def close(self, number: str) -> None:
        """Ignore further data for this number."""
        with self._lock:
            self._downloads.pop(number, None)

    def _take(self, message: Message, cell: str) -> None:
        data = protocol.Data.from_message(message)
        if data is None:
            return
        origin = message.get_header(MessageHeaderKey.ORIGIN)
        if data.receipt is not None:
            self.receipts.add(cell, origin, data.receipt)
        download = self._downloads.get(data.transfer)
        if download is not None:
            download.on_data(origin, data, message.payload)


class RunningClock:
    """Seconds that this process has been running, as one thread sees them: pauses of the process do not count."""

    def __init__(self) -> None:
        self.now = 0.0
        self._last = time.monotonic()

    def tick(self, most: float = _MAX_TICK_SECONDS) -> float:
        """Count the time since the last tick, up to a maximum; return the sum."""
        last, self._last = self._last, time.monotonic()
        self.now += min(self._last - last, most)
        return self.now


class SegmentDownload:
    """Downloads a range of bytes in segments.

    Args:
        remote: The payload.
        what: `protocol.MANIFEST`, `protocol.DATA` or `protocol.ITEM`.
        nbytes: How many bytes there are.
        write: Takes an offset and the bytes that belong there; called from several threads at once.
        item: The item's name, if it is about one.
        start: Offset of the first byte in the item or payload.
        progress: Called regularly with the number of bytes received.
        first_news: Seconds to wait for the first bytes of all.
        on_slow: Called at most once, while nothing is written: no byte at or after this offset has arrived, and the
            rest arrives slowly.
    """

    def __init__(
        self,
        remote: RemotePayload,
        what: str,
        nbytes: int,
        write: Callable[[int, memoryview], None],
        *,
        item: str | None = None,
        start: int = 0,
        progress: Callable[[int], None] | None = None,
        first_news: float | None = None,
        on_slow: Callable[[int], None] | None = None,
    ) -> None:
        self.remote = remote
        self._budget = remote.runtime.budget
        self._what = what
        self._item = item
        self._start = start
        self._nbytes = nbytes
        self._write = write
        self._progress = progress
        self._first_news = first_news
        self._on_slow = on_slow
        self._window = Window(WINDOW_BYTES)
        self._changed = threading.Condition()
        self._next = 0
        self._done = 0
        self._writing = 0  # bytes, like all of these
        self._held = 0  # of the budget
        self._in_flight: dict[int, int] = {}
        self._uncounted: set[int] = set()  # of these, the segments that no longer count in the budget
        self._lost: deque[int] = deque()
        self._failure: BaseException | None = None
        self._closed = False
        self._number = ""
        self._clock = RunningClock()
        self._news = self._asked = 0.0  # times of that clock, like all of these
        self._unreachable_since: float | None = None
        self._resend_at = 0.0
        self._waits_for_budget = False
        self._retry_after = _RETRY_SECONDS
        self._end = 0  # of the bytes that have arrived
        self._progress_since = 0.0, 0  # a time, and the bytes that were done then

    def run(self) -> None:
        """Download everything, or raise why that cannot be."""
        if not self._nbytes:
            return
        self._number = self.remote.runtime.shared(Inbox).open(self)
        try:
            while not self._is_complete():
                self._check()
                self._request_more()
                self._wait()
        finally:
            self.remote.runtime.shared(Inbox).close(self._number)
            self._close()

    def _is_complete(self) -> bool:
        with self._changed:
            return self._done == self._nbytes and not self._writing and self._failure is None

    def _check(self) -> None:
        remote = self.remote
        if self._failure is not None:
            # From an NVFlare thread; raised here with its original trace.
            raise self._failure
        remote.raise_if_aborted()
        now = self._clock.tick()
        silent = now - self._news
        if self._first_news is not None and not self._done and silent > self._first_news:
            raise SegmentTimeoutError(f"{remote.from_fqcn} did not answer a request for a segment in {silent:.0f} s")
        if silent > remote.timeout:
            raise PeerLostError(
                f"{remote.from_fqcn} has sent nothing for {silent:.0f} s, "
                f"with {self._done} of {self._nbytes} bytes here"
            )
        since = self._unreachable_since
        if since is not None and now - since > min(_UNREACHABLE_SECONDS, remote.timeout):
            raise PeerLostError(
                f"{remote.from_fqcn} has been unreachable for {now - since:.0f} s, "
                f"with {self._done} of {self._nbytes} bytes here"
            )

    def _request_more(self) -> None:
        self._waits_for_budget = False
        while self._clock.now >= self._resend_at:
            with self._changed:
                offset = self._lost[0] if self._lost else self._next
                if offset >= self._nbytes or self._failure is not None:
                    return
                count = self._count_at(offset)
                here = sum(self._in_flight.values()) + self._writing
                if here and here + count > self._window.nbytes:
                    return
                holding = self._held
            self._waits_for_budget = not self._budget.acquire(_COPIES * count, holding=holding, timeout=_POLL_SECONDS)
            if self._waits_for_budget:
                return
            with self._changed:
                self._held += _COPIES * count
                if self._lost:
                    self._lost.popleft()
                else:
                    self._next += count
                self._in_flight[offset] = count
                self._window.note_request(offset)
            self._request(offset, count)

    def _count_at(self, offset: int) -> int:
        if not offset and self._first_news is not None and self._what == protocol.DATA:
            return min(_FIRST_BYTES, self._nbytes)
        return min(protocol.SEGMENT_BYTES - offset % protocol.SEGMENT_BYTES, self._nbytes - offset)

    def _request(self, offset: int, count: int) -> None:
        remote = self.remote
        receipts = remote.runtime.shared(Inbox).receipts.take(remote.cell.core_cell.my_info.fqcn, remote.from_fqcn)
        request = protocol.Request(
            self._number, remote.ref_id, self._what, self._start + offset, count, self._item, receipts
        )
        self._clock.tick()
        errors = remote.cell.core_cell.fire_and_forget(
            protocol.CHANNEL,
            protocol.REQUEST_TOPIC,
            remote.from_fqcn,
            Message(request.to_headers(), None),
            secure=remote.secure,
            optional=remote.optional,
        )
        now = self._clock.tick(float("inf"))
        with self._changed:
            if not errors.get(remote.from_fqcn):
                self._unreachable_since = None
            elif offset in self._in_flight:
                self._requeue([offset])
                self._resend_at = now + _RESEND_SECONDS
                if self._unreachable_since is None:
                    self._unreachable_since = now

    def _wait(self) -> None:
        with self._changed:
            if self._failure is None and (self._done < self._nbytes or self._writing):
                self._changed.wait(_POLL_SECONDS)
            now = self._clock.tick()
            if self._in_flight and not self._writing:
                silent = now - max(self._news, self._asked)
                if silent > _STALL_SECONDS:
                    self._refund_budget()
                if silent > self._retry_after:
                    self._requeue(list(self._in_flight))
                    self._asked = now
                    self._retry_after = min(2 * self._retry_after, _MAX_RETRY_SECONDS)
            elif self._waits_for_budget and not self._in_flight:
                # Not for the sender.
                self._news = max(self._news, now)
            self._watch_progress(now)
            done = self._done
        if self._progress is not None:
            self._progress(done)

    def _refund_budget(self) -> None:
        self._uncounted.update(self._in_flight)
        self._budget.release(self._held)
        self._held = 0

    def _requeue(self, offsets: list[int]) -> None:
        """Request these segments again later: they no longer count as in flight."""
        for offset in offsets:
            count = self._in_flight.pop(offset)
            if offset not in self._uncounted:
                self._held -= _COPIES * count
                self._budget.release(_COPIES * count)
        self._uncounted.difference_update(offsets)
        self._lost.extend(offsets)

    def _watch_progress(self, now: float) -> None:
        since, done = self._progress_since
        if self._done >= done + _MIN_PROGRESS_BYTES or self._waits_for_budget:
            self._progress_since = now, self._done
        elif now - since > _PROGRESS_SECONDS and not self._writing and self._on_slow is not None:
            on_slow, self._on_slow = self._on_slow, None
            on_slow(self._end)

    def on_data(self, origin: str, data: protocol.Data, payload: Any) -> None:
        """Write received bytes; called by NVFlare's threads."""
        if origin != self.remote.from_fqcn:
            return
        offset = data.start - self._start
        with self._changed:
            if self._closed or self._failure is not None:
                return
            if data.error is not None:
                self._fail(PeerLostError(f"{origin} refuses to send: {data.error}"))
                return
            count = self._in_flight.get(offset)
            if count is None:
                return
            if payload is not None and not isinstance(payload, (bytes, bytearray, memoryview)):
                self._fail(ProtocolError(f"{origin} sent a {type(payload).__name__}, but bytes were requested"))
                return
            piece = memoryview(b"" if payload is None else payload).cast("B")
            if len(piece) != count:
                self._fail(ProtocolError(f"{origin} sent {len(piece)} bytes, but {count} were requested"))
                return
            del self._in_flight[offset]
            self._window.note_arrival(offset, count)
            self._writing += count
            self._news = self._clock.now
            self._unreachable_since = None
            paid = 0 if offset in self._uncounted else _COPIES * count
            self._uncounted.discard(offset)
        failure: BaseException | None = None
        try:
            self._write(offset, piece)
        except BaseException as error:
            failure = error
        with self._changed:
            self._writing -= count
            self._held -= paid
            self._done += count
            self._end = max(self._end, offset + count)
            self._news = self._clock.now
            self._budget.release(paid)
            if failure is not None:
                self._fail(failure)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._changed.notify_all()

    def _close(self) -> None:
        """Accept no more data, and wait for writes in progress: the destination may be released after this."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._writing)
            self._budget.release(self._held)
            self._held = 0
            self._in_flight.clear()
