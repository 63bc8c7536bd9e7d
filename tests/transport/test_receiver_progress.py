# SPDX-License-Identifier: Apache-2.0
"""Only new bytes for an expected receiver, at a rate that a slow line reaches, keep a payload alive."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvflare_lazy.transport import _receiver_progress
from nvflare_lazy.transport._receiver_progress import Ranges, ReceiverProgress

MIB = 1 << 20


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=40))
def test_ranges(ranges):
    """Ranges in any order count each integer once."""
    known, made = set(), Ranges()
    for start, stop in ranges:
        assert made.add(start, stop) == len(set(range(start, stop)) - known)
        known |= set(range(start, stop))
    edges = made._edges
    assert edges == sorted(set(edges))
    assert {number for at in range(0, len(edges), 2) for number in range(edges[at], edges[at + 1])} == known


def test_many_gaps():
    """A receiver that leaves thousands of gaps is not remembered any better, and takes no more memory."""
    made = Ranges()
    counted = sum(made.add(start, start + 1) for start in range(0, 40_000, 2))
    assert len(made._edges) == _receiver_progress._MAX_EDGES
    assert counted == _receiver_progress._MAX_EDGES // 2
    assert made.add(0, 40_000) == 40_000 - counted


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def time(self):
            return self.now

        monotonic = time

    made = Clock()
    monkeypatch.setattr(_receiver_progress, "time", made)
    return made


def kept_alive(clock, request, every, patience=600.0, limit=10_000):
    """Let requests come at intervals; return the time after which NVFlare has waited in vain, or None."""
    began = last = clock.now
    for number in range(limit):
        clock.now += every
        if clock.now - last > patience:
            return clock.now - began
        if request(number):
            last = clock.now
    return None


def test_a_byte_per_second(clock):
    """A byte per second keeps a payload of 1 GiB alive for two times the patience at most."""
    progress = ReceiverProgress()
    ended = kept_alive(clock, lambda at: progress.sent("site-1", at, at + 1, 600.0), 1.0)
    assert ended <= 1300


def test_the_same_again(clock):
    """A repeated segment does not count; the same segment for another site does."""
    progress = ReceiverProgress()
    assert kept_alive(clock, lambda at: progress.sent("site-1", 0, MIB, 600.0), 1.0) <= 700
    assert progress.sent("site-2", 0, MIB, 600.0)


def test_cells_of_a_site_count_together(clock):
    """A site does not get more time for another of its cells."""
    progress = ReceiverProgress()
    ended = kept_alive(clock, lambda at: progress.sent(f"site-1.cell-{at}", 0, MIB, 600.0), 1.0)
    assert ended <= 700


def test_slow_line(clock):
    """A line of 30 KB/s, with the retries and pauses that an honest receiver has, gets its 200 MiB."""
    progress = ReceiverProgress()
    for at in range(0, 200 * MIB, MIB):
        clock.now += MIB / 30_000 if at % (50 * MIB) else 500  # a pause of some minutes now and then
        progress.sent("site-1", at, at + MIB, 600.0)
        assert clock.now - progress.last < 600
        progress.sent("site-1", at, at + MIB, 600.0)  # it was lost, and is sent again


def test_items(clock):
    """A receiver of whole tensors counts when it asks for a later one; the same item again does not count."""
    progress = ReceiverProgress()
    assert [progress.reached("site-1", position, MIB, 600.0) for position in (-1, 0, 0, 2, 1, 3)] == [
        True, True, False, True, False, True,
    ]  # fmt: skip


def test_number_of_receivers(monkeypatch):
    """The number of receivers that are remembered is limited."""
    monkeypatch.setattr(_receiver_progress, "_MAX_RECEIVERS", 3)
    progress = ReceiverProgress()
    assert [progress.sent(f"site-{number}", 0, 1, 600.0) for number in range(5)] == [True, True, True, False, False]
    assert progress.last <= time.time()
