# SPDX-License-Identifier: Apache-2.0
"""The window of a download: large enough for a line with a delay, and no larger than it has to be on a short one."""

from __future__ import annotations

import heapq

import pytest

from nvflare_lazy.transport.segments._window import Window

MIB = 1 << 20
SEGMENT = 2 * MIB
LEAST, MOST = 8 * MIB, 16 * MIB


class Line:
    """A line with a rate and a round trip, on which a download keeps its window in flight."""

    def __init__(self, mb_per_second, round_trip):
        self.now = 0.0
        self.window = Window(LEAST, MOST, clock=lambda: self.now)
        self.rate = mb_per_second * 1e6
        self._round_trip = round_trip
        self._free_at = 0.0
        self._coming = []
        self._offset = self._in_flight = 0

    def run(self, nbytes):
        """Download `nbytes` bytes; return the rate per second in the second half."""
        half = None
        end = self._offset + nbytes
        while self._offset < end:
            while self._in_flight + SEGMENT <= self.window.nbytes:
                self.window.note_request(self._offset)
                self._free_at = max(self.now + self._round_trip, self._free_at) + SEGMENT / self.rate
                heapq.heappush(self._coming, (self._free_at, self._offset))
                self._offset += SEGMENT
                self._in_flight += SEGMENT
            self.now, offset = heapq.heappop(self._coming)
            self.window.note_arrival(offset, SEGMENT)
            self._in_flight -= SEGMENT
            if half is None and offset >= end - nbytes // 2:
                half = self.now, offset
        return (offset - half[1]) / (self.now - half[0])


@pytest.mark.parametrize(
    ("mb_per_second", "round_trip", "least", "most"),
    [
        (12.5, 0.0, LEAST, LEAST),
        (12.5, 0.08, LEAST, LEAST),
        (500, 0.0, LEAST, LEAST),
        (125, 0.08, 14 * MIB, MOST),
        (500, 0.02, 14 * MIB, MOST),
        (1250, 0.08, MOST, MOST),
    ],
    ids=["slow", "slow and far", "near", "far", "fast", "fast and far"],
)
def test_size(mb_per_second, round_trip, least, most):
    """It grows only where the line holds more, and the line is full unless it holds more than the largest window."""
    line = Line(mb_per_second, round_trip)
    rate = line.run(256 * MIB)
    assert least <= line.window.nbytes <= most
    assert rate >= 0.95 * min(line.rate, most / (round_trip + SEGMENT / line.rate))


def test_it_shrinks():
    """A line that becomes slower holds less, and so does the window, step by step."""
    line = Line(500, 0.04)
    line.run(256 * MIB)
    assert line.window.nbytes == MOST
    line.rate = 20e6
    line.run(256 * MIB)
    assert line.window.nbytes == LEAST


def test_a_segment_that_was_not_requested():
    """Neither it nor one that arrives a second time changes anything."""
    window = Window(LEAST, MOST)
    window.note_arrival(0, SEGMENT)
    window.note_request(0)
    window.note_arrival(0, SEGMENT)
    window.note_arrival(0, SEGMENT)
    assert LEAST <= window.nbytes <= MOST
