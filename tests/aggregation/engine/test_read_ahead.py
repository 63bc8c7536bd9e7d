# SPDX-License-Identifier: Apache-2.0
"""Files are in the page cache before they are needed, but not all of them at once."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from benchmarks.aggregation_limits import cached_bytes, make_cold
from nvflare_lazy.aggregation._engine import read_ahead
from nvflare_lazy.aggregation._engine.read_ahead import FileRange, ReadAhead, Step
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.tensor_file import TensorFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A file of 64 MiB that is not in the page cache."""
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * MIB))
    try:
        make_cold([path])
    except RuntimeError:
        pytest.skip("this file system keeps its files in memory")
    return path


def steps_of(file: TensorFile) -> list[Step]:
    """One for each MiB, of which two small tensors use a part."""
    return [
        Step(MIB, [FileRange(file, begin, 300 << 10), FileRange(file, begin + (700 << 10), 324 << 10)])
        for begin in range(0, file.size, MIB)
    ]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_the_disk_is_ahead_but_not_far(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most as far as the limit, and as far as the kernel itself reads ahead."""
    monkeypatch.setattr(read_ahead, "_MAX_AHEAD", 4 * MIB)
    file = TensorFile(cold)
    with ReadAhead(steps_of(file)) as ahead:
        wait_until(lambda: cached_bytes(cold) >= 4 * MIB)
        time.sleep(0.2)
        assert cached_bytes(cold) <= 36 * MIB
        ahead.advance(60 * MIB)
        wait_until(lambda: cached_bytes(cold) == 64 * MIB)


def test_files_in_the_page_cache_are_left_alone(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(TensorFile, "read_into_page_cache", lambda self, *place: calls.append(place))
    for is_cached in (False, True):
        calls.clear()
        ahead = ReadAhead(steps_of(TensorFile(cold)))
        ahead._run()
        assert bool(calls) is not is_cached
        cold.read_bytes()


def test_a_file_that_is_closed_stops_nothing(cold: Path) -> None:
    """Its reader raises the error; the thread continues with other files."""
    closed, file = TensorFile(cold), TensorFile(cold)
    closed.close()
    with ReadAhead([Step(MIB, [FileRange(closed, 0, MIB)]), *steps_of(file)]):
        wait_until(lambda: cached_bytes(cold) == 64 * MIB)


def test_the_thread_ends_with_the_block(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it waits, or before it has begun."""
    monkeypatch.setattr(read_ahead, "_MAX_AHEAD", 1)
    for seconds in (0, 0.1):
        with ReadAhead(steps_of(TensorFile(cold))):
            time.sleep(seconds)
        assert not any(thread.name.startswith("read-ahead") for thread in threading.enumerate())


def test_ranges_far_apart_are_not_joined(cold: Path) -> None:
    file = TensorFile(cold)
    near = [FileRange(file, 0, MIB), FileRange(file, 2 * MIB, MIB)]
    far = [FileRange(file, 0, MIB), FileRange(file, 20 * MIB, MIB)]
    assert list(read_ahead._spans(near)) == [FileRange(file, 0, 3 * MIB)]
    assert list(read_ahead._spans(far)) == []
    assert FileRange.of(file.source(MIB, MIB), 5, 7) == FileRange(file, MIB + 5, 7)
    assert FileRange.of(MemorySource(bytes(10)), 0, 5) is None
