# SPDX-License-Identifier: Apache-2.0
"""Long reads that are split among several threads.

One core copies from the page cache more slowly than memory allows. Long reads are therefore split into pieces that
several threads read; short reads, which are the most frequent, never reach this module.
"""

from __future__ import annotations

import os
import threading
import zlib
from contextlib import suppress
from functools import lru_cache
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from nvflare_lazy._system import available_cores
from nvflare_lazy._text import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

logger = get_logger(__name__)

# Below this, waking a second thread takes longer than the copy that it could do in that time; each further thread needs
# the same number of bytes more.
MIN_SHARED_BYTES = 3 << 20
_MIN_PIECE_BYTES = 1 << 20
# A thread cannot be interrupted within a piece.
_MAX_PIECE_BYTES = 64 << 20
# The first piece, the caller's, is longer by the bytes that are copied before a helper is awake, and a few more: a
# caller that finishes last does not have to be woken.
_HEAD_START_BYTES = 600 << 10
# Pieces start at page boundaries.
_PAGE = 4096
# More do not copy faster: by then memory is the limit.
_MAX_HELPERS = 3
# How often, and with what pause between, a caller looks for the end of the last piece before it falls asleep.
_MAX_POLLS = 12
_PAUSE = bytes(16 << 10)
_POLL_SECONDS = 0.1


@lru_cache
def _pieces(nbytes: int, workers: int) -> tuple[tuple[int, int], ...]:
    """Cut work into pieces, the long ones first: few in all, and the last ones short, so that all end together."""
    pieces: list[tuple[int, int]] = []
    begin, more = 0, _HEAD_START_BYTES
    while begin < nbytes:
        rest = nbytes - begin
        size = max(_MIN_PIECE_BYTES, min(_MAX_PIECE_BYTES, rest // workers + more)) // _PAGE * _PAGE
        end = nbytes if rest - size < _MIN_PIECE_BYTES // 2 else begin + size
        pieces.append((begin, end))
        begin, more = end, 0
    return tuple(pieces)


class _Job:
    """One read, whose pieces are taken by the threads that are free.

    A helper records that it has started, and stops if the work is over by then; the caller, when no pieces are left,
    waits for the helpers that started before. So a caller never waits for helpers that are busy with other reads.
    """

    def __init__(self, work: Callable[[int, int], None], nbytes: int, helpers: int) -> None:
        self._work = work
        self._helpers = helpers
        self._pieces = iter(_pieces(nbytes, helpers + 1))
        # Lists, since appending to them cannot be interrupted half way.
        self._came: list[None] = []
        self._left: list[None] = []
        self._leaving: SimpleQueue[None] = SimpleQueue()
        self._errors: list[BaseException] = []
        self._failed = False
        self._over = False

    def run(self, helpers: _Helpers) -> None:
        """Work on the pieces together with the helpers, and raise the first error.

        No thread works on a piece after the return, even if the caller is interrupted: helpers write to the caller's
        memory.
        """
        begun, failure = False, None
        while True:
            try:
                if not begun:
                    begun = True
                    helpers.call(self, self._helpers)
                    self._take_pieces()
                self._over = True
                self._wait_for_helpers()
                break
            except BaseException as error:
                self._failed = True
                failure = failure or error
        del self._work  # it holds on to the caller's memory, and this may still be in the queue
        if failure is not None:
            raise failure
        if self._errors:
            raise self._errors[0]

    def help(self) -> None:
        """Take pieces for as long as there are any."""
        self._came.append(None)
        try:
            if not self._over:
                self._take_pieces()
        except BaseException as error:
            self._errors.append(error)
            self._failed = True
        finally:
            self._left.append(None)
            self._leaving.put(None)

    def _take_pieces(self) -> None:
        for begin, end in self._pieces:
            if self._failed:
                return
            self._work(begin, end)

    def _wait_for_helpers(self) -> None:
        # Stay awake for a moment, since being woken takes as long as copying half a MiB.
        for _ in range(_MAX_POLLS):
            if len(self._left) == len(self._came):
                return
            zlib.crc32(_PAUSE)  # some microseconds without the interpreter's lock
        while len(self._left) < len(self._came):
            # An interrupt may have lost a helper's notification: check again from time to time.
            with suppress(Empty):
                self._leaving.get(timeout=_POLL_SECONDS)


class _Helpers:
    """Threads that wait for work: started when they are first needed; a forked child starts its own."""

    def __init__(self) -> None:
        self.most = min(available_cores() - 1, _MAX_HELPERS)
        self._count = 0
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._lock = threading.Lock()

    def call(self, job: _Job, count: int) -> None:
        """Offer a job to some helpers."""
        if self._count < self.most:
            self._start()
        for _ in range(min(count, self._count)):
            self._jobs.put(job)

    def _start(self) -> None:
        with self._lock:
            try:
                while self._count < self.most:
                    threading.Thread(target=self._wait, name=f"nvflare_lazy_read_{self._count}", daemon=True).start()
                    self._count += 1
            except RuntimeError as error:  # no more threads, as when the interpreter is about to end
                logger.debug("Cannot start another reader thread: %s", error)

    def _wait(self) -> None:
        while True:
            job = self._jobs.get()
            job.help()
            del job


def parallel_for_ranges(work: Callable[[int, int], None], nbytes: int) -> None:
    """Call `work(begin, end)` for ranges that cover `nbytes`, in several threads if `nbytes` is large enough.

    Returns when all ranges are done. After an error, no further range is started, and the error is raised when no
    thread works on a range.
    """
    helpers = _helpers
    if nbytes < MIN_SHARED_BYTES or not helpers.most:
        work(0, nbytes)
        return
    _Job(work, nbytes, min(helpers.most, nbytes // MIN_SHARED_BYTES)).run(helpers)


_helpers = _Helpers()


def _reset_after_fork() -> None:
    global _helpers
    _helpers = _Helpers()


os.register_at_fork(after_in_child=_reset_after_fork)
