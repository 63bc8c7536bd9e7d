# SPDX-License-Identifier: Apache-2.0
"""Limits on segments in sending: a receiver that does not read holds little memory, and delays no other receiver.

NVFlare blocks the thread that sends until the connection has taken a message, or queues the message. A segment is
therefore read only when the connection to its receiver accepts bytes. One that stops accepting them in the middle of a
segment holds that segment; these are few, and if others wait for them, the connection that blocks is closed, as NVFlare
does after 30 seconds. The receiver connects again and repeats its requests.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from nvflare_lazy._text import get_logger
from nvflare_lazy.transport import _nvflare_private

if TYPE_CHECKING:
    from collections.abc import Callable

logger = get_logger(__name__)

# Segments that are being sent, in memory twice each: as they were read, and in NVFlare's frame.
_MAX_SENDING_BYTES = 16 << 20
# A segment takes milliseconds, or seconds on a slow line. Slow lines share half of the limit.
_SLOW_SECONDS = 1.0
_MAX_SLOW_RECEIVERS = 1024
# A connection that takes less than this in this time may be closed: less than any line that can carry a model.
_MIN_PROGRESS_BYTES = 64 << 10
_OVERDUE_SECONDS = 5.0
_POLL_SECONDS = 0.02


class Send:
    """One segment to be sent."""

    __slots__ = ("connection", "nbytes", "progress", "receiver", "started", "taken")

    def __init__(self, nbytes: int, receiver: str, connection: Any) -> None:
        self.nbytes = nbytes
        self.receiver = receiver
        self.connection = connection
        self.started = self.progress = 0.0
        self.taken = 0


class SendBudget:
    """The bytes that are being sent by this process."""

    def __init__(self, limit: int = _MAX_SENDING_BYTES) -> None:
        self._limit = limit
        self._changed = threading.Condition(threading.RLock())
        self._sends: set[Send] = set()
        self._slow: dict[str, None] = {}

    def permits(self, send: Send, timeout: float = 0.0) -> bool:
        """Wait until the limits permit a send; false if they do not in this time."""
        with self._changed:
            permitted = self._changed.wait_for(lambda: self._fits(send), timeout)
            if not permitted:
                self._close_overdue(send)
            return permitted

    def acquire(self, send: Send, timeout: float) -> bool:
        """Count a send as soon as the limits permit it; false if they do not in this time."""
        with self._changed:
            if not self.permits(send, timeout):
                return False
            send.started = send.progress = time.monotonic()
            send.taken = _nvflare_private.nbytes_taken(send.connection) or 0
            self._sends.add(send)
            return True

    def release(self, send: Send) -> None:
        """The send is over."""
        with self._changed:
            self._sends.discard(send)
            self._slow.pop(send.receiver, None)
            if time.monotonic() - send.started > _SLOW_SECONDS:
                self._slow[send.receiver] = None
                if len(self._slow) > _MAX_SLOW_RECEIVERS:
                    del self._slow[next(iter(self._slow))]
            self._changed.notify_all()

    @property
    def used(self) -> int:
        """Bytes that are being sent."""
        with self._changed:
            return sum(other.nbytes for other in self._sends)

    def _fits(self, send: Send) -> bool:
        used = [other.nbytes for other in self._sends]
        if send.receiver in self._slow:
            slow = [other.nbytes for other in self._sends if other.receiver in self._slow]
            if slow and sum(slow) + send.nbytes > self._limit // 2:
                return False
        return not used or sum(used) + send.nbytes <= self._limit

    def _close_overdue(self, waiting: Send) -> None:
        """Close the connections that block others and take nothing."""
        now = time.monotonic()
        for send in self._sends:
            if send.connection is None or send.connection is waiting.connection:
                continue
            taken = _nvflare_private.nbytes_taken(send.connection)
            if taken is not None and taken - send.taken >= _MIN_PROGRESS_BYTES:
                send.taken, send.progress = taken, now
            elif now - send.progress > _OVERDUE_SECONDS:
                logger.warning(
                    "Closed the connection to %s: it accepts no data, and other receivers wait", send.receiver
                )
                connection, send.connection = send.connection, None
                connection.close()


class PausedReceivers:
    """Receivers that cannot be served at the moment; one thread watches them, as long as there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Any, tuple[Callable[[], bool], Callable[[], None]]] = {}
        self._running = False

    def call_when(self, key: Any, is_open: Callable[[], bool], function: Callable[[], None]) -> None:
        """Call a function, once a condition is true; neither may block or raise."""
        with self._lock:
            self._waiting[key] = (is_open, function)
            if not self._running:
                self._running = True
                threading.Thread(target=self._watch, name="nvflare_lazy_wait", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL_SECONDS)
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                waiting = list(self._waiting.items())
            for key, (is_open, function) in waiting:
                if is_open():
                    with self._lock:
                        del self._waiting[key]
                    function()
