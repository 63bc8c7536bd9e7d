# SPDX-License-Identifier: Apache-2.0
"""`Quota`: limits the bytes of a job on disk, by its own quota and by the space that must stay free.

A download reserves bytes through its `QuotaReservation` before they are written. All of them are released with it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from nvflare_lazy._text import format_size, parse_size
from nvflare_lazy.errors import DiskFullError, QuotaExceededError

if TYPE_CHECKING:
    from nvflare_lazy.scratch._recycled_files import RecycledFiles

# Bytes written between two checks of the disk, which other programs also fill.
CHECK_INTERVAL_BYTES = 16 << 20
_DEFAULT_MIN_FREE = 1 << 30


def min_free_bytes(min_free: int | str | None, total: int) -> int:
    """Return how many of `total` bytes of a file system must stay free."""
    if min_free is None:
        return min(_DEFAULT_MIN_FREE, total // 20)
    return parse_size(min_free, of=total)


class Quota:
    """The bytes that one job holds, exact under any number of threads.

    Its directory is any on the file system that is written to.
    """

    def __init__(self, directory: str | os.PathLike[str], limit: int | None, min_free: int) -> None:
        self.directory = os.fspath(directory)
        self.limit = limit
        self.min_free = min_free
        #: Files that are not counted as used, and are removed when their space is needed.
        self.recycled_files: RecycledFiles | None = None
        self._lock = threading.RLock()
        self._used = 0
        self._pending = 0  # the part of it that is not written yet
        self._peak = self._recent_peak = 0
        self._free = 0  # of the file system, at the last check
        self._written = CHECK_INTERVAL_BYTES  # since then
        # Bytes released by the garbage collector: a collection may start in the middle of any of the blocks below, in
        # the same thread, and appending to a deque is safe even then.
        self._released: deque[tuple[int, int]] = deque()

    @property
    def used(self) -> int:
        """Bytes held now."""
        with self._lock:
            self._subtract_released()
            return self._used

    @property
    def peak(self) -> int:
        """Most bytes ever held at once."""
        with self._lock:
            return self._peak

    def take_peak(self) -> int:
        """Return the most bytes held at once since the last call."""
        with self._lock:
            self._subtract_released()
            peak, self._recent_peak = self._recent_peak, self._used
            return peak

    def free(self) -> int:
        """Return how many bytes could be held in addition."""
        with self._lock:
            self._check_disk()
            recycled = 0 if self.recycled_files is None else self.recycled_files.nbytes
            room = self._free - self._pending - self.min_free + recycled
            if self.limit is not None:
                room = min(room, self.limit - self._used)
            return max(0, room)

    def reserve(self, nbytes: int) -> None:
        """Hold bytes that are going to be written, or raise and hold none of them."""
        with self._lock:
            self._check_limit(nbytes)
            self._check_room(nbytes)
            self._used += nbytes
            self._pending += nbytes
            self._note_peak()

    def adopt(self, nbytes: int) -> None:
        """Hold bytes that are on the disk already, or raise and hold none of them."""
        with self._lock:
            self._check_limit(nbytes)
            self._used += nbytes
            self._note_peak()
            self._written = CHECK_INTERVAL_BYTES  # not yet seen by the last check of the disk

    def record_written(self, nbytes: int, pending: int) -> None:
        """Count held bytes as written; check the disk from time to time, and raise when it fills up.

        Args:
            nbytes: Bytes that a download has written.
            pending: Bytes that the same download is going to write. Those of other downloads do not end it: they
                may have stalled, and they fail on their own if the disk has too little space for them.
        """
        with self._lock:
            self._pending -= nbytes
            self._written += nbytes
            if self._written >= CHECK_INTERVAL_BYTES:
                self._check_room(0, pending)

    def _note_peak(self) -> None:
        self._peak = max(self._peak, self._used)
        self._recent_peak = max(self._recent_peak, self._used)

    def release(self, used: int, pending: int) -> None:
        """Release bytes; safe to call from a finalizer."""
        self._released.append((used, pending))

    def _subtract_released(self) -> None:
        while self._released:
            used, pending = self._released.popleft()
            self._used -= used
            self._pending -= pending

    def _check_limit(self, nbytes: int) -> None:
        if self._released:
            self._subtract_released()
        if self.limit is not None and self._used + nbytes > self.limit:
            raise QuotaExceededError(
                f"reserving {format_size(nbytes)} would exceed the scratch quota of {format_size(self.limit)} "
                f"({format_size(self._used)} used); raise the quota, or check which client sends oversized results"
            )
        if self.limit is not None and self.recycled_files is not None:
            self.recycled_files.remove(self._used + nbytes + self.recycled_files.nbytes - self.limit)

    def _check_room(self, nbytes: int, own_pending: int | None = None) -> None:
        """Raise if the disk lacks space for more bytes and the pending bytes of all downloads, or of one."""
        needed = (self._pending if own_pending is None else own_pending) + nbytes + self.min_free
        if self._written + nbytes < CHECK_INTERVAL_BYTES and self._free - self._written >= needed:
            return
        self._check_disk()
        pending = self._pending if own_pending is None else own_pending
        needed = pending + nbytes + self.min_free
        if self._free < needed and self.recycled_files is not None:
            self.recycled_files.remove(needed - self._free)
            self._check_disk()
        if self._free < needed:
            raise DiskFullError(
                f"{self.directory} has {format_size(self._free)} free, too little for {format_size(nbytes)} more, "
                f"{format_size(pending)} already reserved and {format_size(self.min_free)} of min_free; "
                "free some space, choose a scratch root on a larger disk, or lower min_free"
            )

    def _check_disk(self) -> None:
        self._subtract_released()
        try:
            disk = os.statvfs(self.directory)
        except OSError:
            # Deleted while in use, which the next creation of a file reports; the disk itself still reports when full.
            self._free = 1 << 62
        else:
            self._free = disk.f_bavail * disk.f_frsize
        self._written = 0


class QuotaReservation:
    """The bytes that one download holds of the quota of its job."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._lock = threading.RLock()
        self._held = 0
        self._unassigned = 0  # the part of it that no file has yet
        self._pending = 0
        self._closed = False

    def reserve(self, nbytes: int) -> None:
        """Hold bytes for later files."""
        with self._lock:
            self._quota.reserve(nbytes)
            self._held += nbytes
            self._pending += nbytes
            self._unassigned += nbytes

    def assign(self, nbytes: int) -> None:
        """Hold bytes for a file: reserved ones as long as there are any, then more."""
        with self._lock:
            if self._closed:  # by a signal handler, in the middle of a write
                return
            more = max(0, nbytes - self._unassigned)
            if more:
                self._quota.reserve(more)
                self._held += more
                self._pending += more
            self._unassigned -= nbytes - more

    def adopt(self, before: int, now: int) -> None:
        """Count a file that was not written through this package, and release the rest of the reserved bytes.

        The file has `now` bytes on the disk, and `before` of them were counted for it before.
        """
        with self._lock:
            if self._closed:
                return
            more = max(0, now - before - self._unassigned)
            self._quota.adopt(more)
            self._held += more
            # The file takes its part of the reserved bytes, and the rest is not needed.
            self._release(self._unassigned + before + more - now, self._unassigned)
            self._unassigned = 0

    def record_written(self, nbytes: int) -> None:
        """Count bytes that were assigned to a file as written."""
        with self._lock:
            if self._closed:
                return
            self._pending -= nbytes
            pending = self._pending
        self._quota.record_written(nbytes, pending)

    def release_unused(self, nbytes: int, pending: int) -> None:
        """Release bytes that a file did not need; `pending` of the file's bytes are not going to be written."""
        with self._lock:
            if not self._closed:
                self._release(nbytes, pending)

    def close(self) -> None:
        """Release everything: the files are gone. Safe to call from a finalizer, and more than once."""
        with self._lock:
            self._closed = True
            self._release(self._held, self._pending)
            self._unassigned = 0

    def _release(self, nbytes: int, pending: int) -> None:
        self._held -= nbytes
        self._pending -= pending
        self._quota.release(nbytes, pending)
