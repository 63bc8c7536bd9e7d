# SPDX-License-Identifier: Apache-2.0
"""Which bytes of a tensor have been written: every one of them once, before a file may appear.

Tiles come from several threads and in any order; the streaming writer keeps one of these for each tensor.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class WrittenRanges:
    """The parts of `nbytes` bytes that are there, merged where they touch. Callers hold a lock."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._ranges: list[tuple[int, int]] = []

    def add(self, begin: int, end: int) -> bool:
        """Note that a range was written; return False if some of it had been written before."""
        if begin == end:
            return True
        place = bisect_left(self._ranges, (begin, end))
        if place < len(self._ranges) and self._ranges[place][0] < end:
            return False
        if place and self._ranges[place - 1][1] > begin:
            return False
        if place < len(self._ranges) and self._ranges[place][0] == end:
            end = self._ranges.pop(place)[1]
        if place and self._ranges[place - 1][1] == begin:
            begin = self._ranges.pop(place - 1)[0]
        insort(self._ranges, (begin, end))
        return True

    @property
    def first_gap(self) -> tuple[int, int] | None:
        """The first range that is missing, or None if all is there."""
        begin, end = 0, self._nbytes
        if self._ranges:
            first = self._ranges[0]
            if first[0] == 0:
                begin = first[1]
                end = self._ranges[1][0] if len(self._ranges) > 1 else self._nbytes
            else:
                end = first[0]
        return (begin, end) if begin < end else None
