# SPDX-License-Identifier: Apache-2.0
"""One number for the bytes that all of a process's downloads together may have under way.

Every request for a segment takes from it and gives back when the bytes are written, so what a server holds of its
clients' results in memory does not grow with their number.
"""

from __future__ import annotations

import threading

DEFAULT_BYTES = 32 << 20


class InflightBudget:
    """Bytes that may be on their way to this process.

    Args:
        limit: How many.
    """

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self._changed = threading.Condition()
        self._limit = limit
        self._used = 0
        self._peak = 0
        self._starving = 0

    @property
    def limit(self) -> int:
        """The most bytes under way."""
        return self._limit

    @property
    def used(self) -> int:
        """Bytes under way now."""
        return self._used

    @property
    def peak(self) -> int:
        """The most that were ever under way."""
        return self._peak

    def resize(self, limit: int) -> None:
        """Change the limit; what is under way already stays so."""
        if limit < 1:
            raise ValueError(f"a budget of {limit} bytes lets nothing through")
        with self._changed:
            self._limit = limit
            self._changed.notify_all()

    def take(self, nbytes: int, *, holding: int, timeout: float = 0.0) -> bool:
        """Take bytes if there are any left.

        Args:
            nbytes: How many.
            holding: How many the caller has under way already. Who has none goes first, so that a busy download
                cannot keep a new one waiting.
            timeout: Seconds to wait for them.
        """
        with self._changed:
            if holding:
                granted = not self._starving and self._fits(nbytes)
            else:
                self._starving += 1
                try:
                    granted = self._changed.wait_for(lambda: self._fits(nbytes), timeout)
                finally:
                    self._starving -= 1
            if granted:
                self._used += nbytes
                self._peak = max(self._peak, self._used)
            return granted

    def give_back(self, nbytes: int) -> None:
        """Give bytes back that were taken."""
        with self._changed:
            self._used -= nbytes
            self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        # Something must always be able to move, even through a budget smaller than a segment.
        return self._used + nbytes <= self._limit or self._used == 0
