# SPDX-License-Identifier: Apache-2.0
"""Calls functions later, all on one thread, where NVFlare starts a thread for each.

NVFlare keeps a note of each message that it received for a minute, and a thread of its own that waits to remove it:
with whole tensors from clients without this package these are hundreds, and each costs its stack.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class TimerQueue:
    """Calls functions after some time, one after the other; they must be quick.

    Args:
        name: The name of its thread, which is there as long as something waits.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Later]] = []
        self._numbers = itertools.count()
        self._running = False

    def call_later(self, seconds: float, function: Callable[[], object]) -> Later:
        """Call a function after so many seconds."""
        later = Later(self, function)
        with self._changed:
            heapq.heappush(self._waiting, (time.monotonic() + seconds, next(self._numbers), later))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            elif self._waiting[0][2] is later:
                self._changed.notify()
        return later

    def drop(self, later: Later) -> None:
        """Forget what was to be called."""
        with self._changed:
            self._waiting = [entry for entry in self._waiting if entry[2] is not later]
            heapq.heapify(self._waiting)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._waiting and (left := self._waiting[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left)
                if not self._waiting:
                    self._running = False
                    return
                later = heapq.heappop(self._waiting)[2]
            later.call()
            del later


class Later:
    """A function that is going to be called, unless it is cancelled."""

    __slots__ = ("_function", "_queue")

    def __init__(self, queue: TimerQueue, function: Callable[[], object]) -> None:
        self._queue = queue
        self._function: Callable[[], object] | None = function

    def cancel(self) -> None:
        """Do not call it; does nothing if it was called already."""
        if self._function is not None:
            self._function = None
            self._queue.drop(self)

    def call(self) -> None:
        """Call it, now."""
        function, self._function = self._function, None
        if function is None:
            return
        try:
            function()
        except Exception:
            logger.exception("what was to be done later failed")
