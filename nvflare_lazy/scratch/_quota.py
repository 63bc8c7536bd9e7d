# SPDX-License-Identifier: Apache-2.0
"""The bytes a job holds on disk: counted against its quota, and against what must stay free for everybody else.

A download holds bytes through its `Allotment`, before they are written; when it goes, all of them come back.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from nvflare_lazy._text import format_size, parse_size
from nvflare_lazy.errors import DiskFullError, QuotaExceededError

if TYPE_CHECKING:
    from nvflare_lazy.scratch._recycled_files import SpareFiles

# How much is written between two looks at the disk: other programs fill it, too.
LOOK_EVERY = 16 << 20
_USUAL_MIN_FREE = 1 << 30


def min_free_bytes(min_free: int | str | None, total: int) -> int:
    """Return how much must stay free of a file system with so many bytes."""
    if min_free is None:
        return min(_USUAL_MIN_FREE, total // 20)
    return parse_size(min_free, of=total)


class SpaceAccount:
    """What one job holds, exact under any number of threads.

    Args:
        place: A directory on the file system that is written to.
        quota: Most bytes the job may hold, or None.
        min_free: Bytes of the file system to leave free.
    """

    def __init__(self, place: str | os.PathLike[str], quota: int | None, min_free: int) -> None:
        self.place = os.fspath(place)
        self.quota = quota
        self.min_free = min_free
        self._lock = threading.RLock()
        self._used = 0
        self._pending = 0  # the part of it that is not written yet
        #: Files that are not counted as used, and are removed where they are in the way.
        self.spares: SpareFiles | None = None
        self._peak = 0
        self._free = 0  # of the file system, when last looked at
        self._written = LOOK_EVERY  # since then
        # What garbage collection gives back arrives here: a collection may start in the middle of any of the blocks
        # below, in the same thread, and appending to a deque is safe even then.
        self._returned: deque[tuple[int, int]] = deque()

    @property
    def used(self) -> int:
        """Bytes held now."""
        with self._lock:
            self._take_back()
            return self._used

    @property
    def peak(self) -> int:
        """Most bytes ever held at once."""
        with self._lock:
            return self._peak

    def free(self) -> int:
        """Bytes that could be held beyond those that are."""
        with self._lock:
            self._look()
            room = self._free - self._pending - self.min_free + (0 if self.spares is None else self.spares.nbytes)
            if self.quota is not None:
                room = min(room, self.quota - self.used)
            return max(0, room)

    def hold(self, nbytes: int) -> None:
        """Hold bytes that are going to be written, or raise and hold none of them."""
        with self._lock:
            self._check_quota(nbytes)
            if self.quota is not None and self.spares is not None:
                self.spares.drop(self._used + nbytes + self.spares.nbytes - self.quota)
            self._check_room(nbytes)
            self._used += nbytes
            self._pending += nbytes
            self._peak = max(self._peak, self._used)

    def adopt(self, nbytes: int) -> None:
        """Hold bytes that are on the disk already, or raise and hold none of them."""
        with self._lock:
            self._check_quota(nbytes)
            self._used += nbytes
            self._peak = max(self._peak, self._used)
            self._written = LOOK_EVERY  # so that the next check asks the disk

    def wrote(self, nbytes: int) -> None:
        """Count held bytes as written; look at the disk from time to time, and raise when it fills up."""
        with self._lock:
            self._pending -= nbytes
            self._written += nbytes
            if self._written >= LOOK_EVERY:
                self._check_room(0)

    def give_back(self, used: int, pending: int) -> None:
        """Return bytes; safe to call from a finalizer."""
        self._returned.append((used, pending))

    def _take_back(self) -> None:
        while self._returned:
            used, pending = self._returned.popleft()
            self._used -= used
            self._pending -= pending

    def _check_quota(self, nbytes: int) -> None:
        self._take_back()
        if self.quota is not None and self._used + nbytes > self.quota:
            raise QuotaExceededError(
                f"{format_size(nbytes)} more would exceed the job's scratch quota of {format_size(self.quota)}, "
                f"of which {format_size(self._used)} are used; raise the quota, or look for who sends so much"
            )

    def _check_room(self, nbytes: int) -> None:
        needed = self._pending + nbytes + self.min_free
        if self._written + nbytes < LOOK_EVERY and self._free - self._written >= needed:
            return
        self._look()
        needed = self._pending + nbytes + self.min_free
        if self._free < needed and self.spares is not None:
            self.spares.drop(needed - self._free)
            self._look()
        if self._free < needed:
            raise DiskFullError(
                f"{self.place} has {format_size(self._free)} free: too little for {format_size(nbytes)} more, "
                f"{format_size(self._pending)} on their way and {format_size(self.min_free)} that stay free; "
                "make room there, choose a scratch root on a larger disk, or lower min_free"
            )

    def _look(self) -> None:
        self._take_back()
        try:
            disk = os.statvfs(self.place)
        except OSError:
            # Deleted underneath, which whoever creates a file there finds out; the disk itself still says when full.
            self._free = 1 << 62
        else:
            self._free = disk.f_bavail * disk.f_frsize
        self._written = 0


class Allotment:
    """One download's part of its job's account."""

    def __init__(self, account: SpaceAccount) -> None:
        self._account = account
        self._lock = threading.RLock()
        self._held = 0
        self._expected = 0  # the part of it that no file has taken yet
        self._pending = 0
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._held

    def expect(self, nbytes: int) -> None:
        """Hold bytes for files to come."""
        with self._lock:
            self._hold(nbytes)
            self._expected += nbytes

    def take(self, nbytes: int) -> None:
        """Hold bytes for a file: expected ones as long as there are any, then more."""
        with self._lock:
            expected = min(nbytes, self._expected)
            self._hold(nbytes - expected)
            self._expected -= expected

    def adopt(self, before: int, now: int) -> None:
        """Count a file that was not written through this package, and return what was expected beyond it.

        Args:
            before: Bytes that were counted for it before.
            now: Bytes it has on the disk.
        """
        with self._lock:
            more = now - before
            if more < 0:
                self._return(-more, 0)
            else:
                expected = min(more, self._expected)
                self._account.adopt(more - expected)
                self._held += more - expected
                self._expected -= expected
                self._return(0, expected)
            self.settle()

    def wrote(self, nbytes: int) -> None:
        """Count bytes that a file took as written."""
        with self._lock:
            if self._closed:
                return
            self._pending -= nbytes
        self._account.wrote(nbytes)

    def give_back(self, held: int, pending: int) -> None:
        """Return bytes that a file took and did not need, and how many of its bytes are not going to be written."""
        with self._lock:
            if not self._closed:
                self._return(held, pending)

    def settle(self) -> None:
        """Return what was expected and did not come."""
        with self._lock:
            self._return(self._expected, self._expected)
            self._expected = 0

    def close(self) -> None:
        """Return everything: the files are gone. Safe to call from a finalizer, and more than once."""
        with self._lock:
            self._closed = True
            self._return(self._held, self._pending)
            self._expected = 0

    def _hold(self, nbytes: int) -> None:
        if nbytes:
            self._account.hold(nbytes)
            self._held += nbytes
            self._pending += nbytes

    def _return(self, held: int, pending: int) -> None:
        self._held -= held
        self._pending -= pending
        self._account.give_back(held, pending)
