# SPDX-License-Identifier: Apache-2.0
"""Bytes of files are in memory before they are needed, without the page cache."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from benchmarks.aggregation_limits import cached_bytes, make_cold
from nvflare_lazy.aggregation._engine import read_ahead
from nvflare_lazy.aggregation._engine.read_ahead import STEP_BYTES, FileRange, ReadAhead
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.tensor_file import TensorFile

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A file of 40 MiB and some bytes that is not in the page cache."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(40 * MIB + 1001))
    try:
        make_cold([path])
    except RuntimeError:
        pytest.skip("this file system keeps its files in memory")
    return path


def steps_of(file: TensorFile) -> list[list[FileRange]]:
    """One for each MiB, of which two small tensors use a part, and one for the last bytes of the file."""
    places = [(begin + start, 300 << 10) for begin in range(0, 40 * MIB, MIB) for start in (77, 700 << 10)]
    pairs = [[FileRange(file, *place) for place in places[at : at + 2]] for at in range(0, len(places), 2)]
    return [*pairs, [FileRange(file, 40 * MIB, 1001)]]


def found_in(file: TensorFile, steps: list[list[FileRange]]) -> list[bytes | None]:
    """The bytes of each range that were read ahead."""
    found = []
    with ReadAhead([file], steps, 1) as ahead:
        for number, ranges in enumerate(steps):
            with ahead.step(number) as loaded:
                places = [loaded.find(wanted) for wanted in ranges]
                found += [None if place is None else place.numpy().tobytes() for place in places]
    return found


def test_all_bytes_in_order(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More steps than buffers; the page cache does not have the file afterwards."""
    file = TensorFile(cold)
    steps = steps_of(file)
    found = found_in(file, steps)
    assert cached_bytes(cold) < 10 * MIB  # of the looks into the page cache
    bytes_of_file = cold.read_bytes()
    expected = [bytes_of_file[each.offset : each.offset + each.nbytes] for step in steps for each in step]
    assert found == expected
    make_cold([cold])
    # As on a file system that has no direct reads.
    monkeypatch.delattr(os, "O_DIRECT")
    assert found_in(file, steps) == expected


def test_threads_of_a_pass(cold: Path) -> None:
    """Each step is lent to the thread that asks for it, whatever the order of their ends."""
    file, bytes_of_file = TensorFile(cold), cold.read_bytes()
    make_cold([cold])
    steps = steps_of(file)
    numbers, lock, wrong, right = iter(range(len(steps))), threading.Lock(), [], []

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            with ahead.step(number) as loaded:
                for wanted in steps[number]:
                    place = loaded.find(wanted)
                    expected = bytes_of_file[wanted.offset : wanted.offset + wanted.nbytes]
                    (right if place is not None and place.numpy().tobytes() == expected else wrong).append(wanted)

    with ReadAhead([file], steps, 5) as ahead:
        threads = [threading.Thread(target=work) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert len(right) == 81


def test_files_in_the_page_cache_are_left_alone(cold: Path) -> None:
    """Nothing is started for them."""
    cold.read_bytes()
    file, threads = TensorFile(cold), threading.active_count()
    with ReadAhead([file], steps_of(file), 2) as ahead:
        assert threading.active_count() == threads
        with ahead.step(7) as loaded:
            assert loaded.find(steps_of(file)[7][0]) is None


def test_bytes_that_cannot_be_read_ahead(cold: Path) -> None:
    """The caller reads it: other bytes than announced, more than a buffer, large gaps, a shortened or a closed file."""
    closed, file = TensorFile(cold), TensorFile(cold)
    closed.close()
    steps = [
        [FileRange(file, 0, MIB)],
        [FileRange(file, 0, STEP_BYTES + MIB)],
        [FileRange(file, 0, 1), FileRange(file, 5 * MIB, 1)],
        [FileRange(closed, 0, MIB)],
        [FileRange(file, 40 * MIB - 1, 500)],
    ]
    with cold.open("r+b") as shortened:
        shortened.truncate(40 * MIB)
    make_cold([cold])
    with ReadAhead([closed, file], steps, 2) as ahead:
        for number, step in enumerate(steps):
            with ahead.step(number) as loaded:
                assert (loaded.find(step[0]) is None) == (number > 0)
                assert loaded.find(FileRange(file, 20 * MIB, 1)) is None
                assert loaded.find(None) is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_end_of_the_readers_stops_nothing(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread waits for them forever; it reads by itself."""
    monkeypatch.setattr(read_ahead, "_spans", lambda ranges: 1 / 0)
    file = TensorFile(cold)
    assert found_in(file, steps_of(file)) == [None] * 81


def test_an_early_end(cold: Path) -> None:
    """The block ends although buffers are full that no thread has asked for."""
    file, threads = TensorFile(cold), threading.active_count()
    with pytest.raises(KeyError), ReadAhead([file], steps_of(file), 2) as ahead, ahead.step(0):
        raise KeyError
    assert threading.active_count() == threads


def test_bytes_that_are_not_in_a_file() -> None:
    assert FileRange.of(MemorySource(bytes(9)), 0, 9) is None
