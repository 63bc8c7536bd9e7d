# SPDX-License-Identifier: Apache-2.0
"""Work on a long run of bytes, shared among the cores.

One core copies from the page cache slower than memory can give. What is read in one go is therefore read by several
threads, piece by piece; short reads, most by number, never come here.
"""

from __future__ import annotations

import logging
import os
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

# Waking another thread takes as long as copying some MiB.
LEAST_SHARED_BYTES = 6 << 20
_LEAST_PIECE_BYTES = 1 << 20
_PIECES = 16
# More do not copy faster: by then memory is the limit.
_MOST_HELPERS = 3


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Job:
    """Work that whoever is free takes pieces of.

    A helper sits down before it begins; the caller, when no pieces are left, takes the seats that are still free, and
    waits for those that are not. So nobody waits for helpers that are busy with the work of others.
    """

    def __init__(self, work: Callable[[int, int], None], nbytes: int, seats: int) -> None:
        self._work = work
        self._nbytes = nbytes
        self._piece = max(_LEAST_PIECE_BYTES, -(-nbytes // _PIECES))
        self._begins = iter(range(0, nbytes, self._piece))
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
                seat.acquire()
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
        for begin in self._begins:
            if self._stopped:
                return
            self._work(begin, min(begin + self._piece, self._nbytes))


class _Helpers:
    """Threads that wait for work: none until they are needed, and none inherited by a forked child."""

    def __init__(self) -> None:
        self.most = min(available_cores() - 1, _MOST_HELPERS)
        self._count = 0
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._lock = threading.Lock()

    def call(self, job: _Job) -> None:
        """Have all helpers look at a job."""
        with self._lock:
            try:
                while self._count < self.most:
                    threading.Thread(target=self._wait, name=f"nvflare_lazy_read_{self._count}", daemon=True).start()
                    self._count += 1
            except RuntimeError as error:  # no more threads, as when the interpreter is about to end
                logger.debug("nobody more helps with reading: %s", error)
        for _ in range(self._count):
            self._jobs.put(job)

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
    job = _Job(work, nbytes, helpers.most)
    helpers.call(job)
    job.run()


_helpers = _Helpers()


def _forget_helpers() -> None:
    global _helpers
    _helpers = _Helpers()


os.register_at_fork(after_in_child=_forget_helpers)
