# SPDX-License-Identifier: Apache-2.0
"""Work on a long run of bytes, shared among the cores.

One core copies from the page cache slower than memory can give. What is read in one go is therefore read by several
threads, piece by piece; short reads, most by number, never come here.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from functools import lru_cache
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

# Below this, waking another thread takes longer than what it could copy meanwhile; each further one takes as much more.
LEAST_SHARED_BYTES = 3 << 20
_LEAST_PIECE_BYTES = 1 << 20
# Nobody can be interrupted within a piece.
_MOST_PIECE_BYTES = 64 << 20
# The first piece, the caller's, is longer by what is copied before a helper is awake.
_HEAD_START_BYTES = 400 << 10
# Pieces begin at pages.
_PAGE = 4096
# More do not copy faster: by then memory is the limit.
_MOST_HELPERS = 3
# How often, and with what pause between, a caller looks for the end of the last piece before it falls asleep.
_LOOKS = 12
_PAUSE = bytes(16 << 10)


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache
def _pieces(nbytes: int, workers: int) -> tuple[tuple[int, int], ...]:
    """Cut work into pieces, the long ones first: few in all, and the last ones short, so that all end together."""
    pieces: list[tuple[int, int]] = []
    begin, more = 0, _HEAD_START_BYTES
    while begin < nbytes:
        rest = nbytes - begin
        size = max(_LEAST_PIECE_BYTES, min(_MOST_PIECE_BYTES, rest // workers + more)) // _PAGE * _PAGE
        end = nbytes if rest - size < _LEAST_PIECE_BYTES // 2 else begin + size
        pieces.append((begin, end))
        begin, more = end, 0
    return tuple(pieces)


def _take(seat: threading.Lock) -> None:
    """Take a seat, and stay awake for a moment if it is not free: to be woken takes as long as copying half a MiB."""
    for _ in range(_LOOKS):
        if seat.acquire(blocking=False):
            return
        zlib.crc32(_PAUSE)  # some microseconds in which others have the interpreter
    seat.acquire()


class _Job:
    """Work that whoever is free takes pieces of.

    A helper sits down before it begins; the caller, when no pieces are left, takes the seats that are still free, and
    waits for those that are not. So nobody waits for helpers that are busy with the work of others.
    """

    def __init__(self, work: Callable[[int, int], None], nbytes: int, seats: int) -> None:
        self._work = work
        self._pieces = iter(_pieces(nbytes, seats + 1))
        self._seats = [threading.Lock() for _ in range(seats)]
        self._errors: list[BaseException] = []
        self._stopped = False

    def run(self) -> None:
        """Do what others leave, return when all of it is done, and raise the first error."""
        try:
            self._take_pieces()
        finally:
            self._stopped = True
            for seat in self._seats:
                _take(seat)
            del self._work  # it holds on to the caller's memory, and this may still be in the queue
        if self._errors:
            raise self._errors[0]

    def help(self) -> None:
        """Take pieces for as long as there are any."""
        seat = next((seat for seat in self._seats if seat.acquire(blocking=False)), None)
        if seat is None:
            return
        try:
            self._take_pieces()
        except BaseException as error:
            self._errors.append(error)
            self._stopped = True
        finally:
            seat.release()

    def _take_pieces(self) -> None:
        for begin, end in self._pieces:
            if self._stopped:
                return
            self._work(begin, end)


class _Helpers:
    """Threads that wait for work: none until they are needed, and none inherited by a forked child."""

    def __init__(self) -> None:
        self.most = min(available_cores() - 1, _MOST_HELPERS)
        self._count = 0
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._lock = threading.Lock()

    def call(self, job: _Job, count: int) -> None:
        """Have some helpers look at a job."""
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
                logger.debug("nobody more helps with reading: %s", error)

    def _wait(self) -> None:
        while True:
            job = self._jobs.get()
            job.help()
            del job


def in_shares(work: Callable[[int, int], None], nbytes: int) -> None:
    """Do `work(begin, end)` for ranges that make up `nbytes`, several at the same time where that is worth it.

    Returns when all of it is done. After an error no piece is begun any more, and it is raised once no thread works
    on one.
    """
    helpers = _helpers
    if nbytes < LEAST_SHARED_BYTES or not helpers.most:
        work(0, nbytes)
        return
    wanted = min(helpers.most, nbytes // LEAST_SHARED_BYTES)
    job = _Job(work, nbytes, wanted)
    helpers.call(job, wanted)
    job.run()


_helpers = _Helpers()


def _forget_helpers() -> None:
    global _helpers
    _helpers = _Helpers()


os.register_at_fork(after_in_child=_forget_helpers)
