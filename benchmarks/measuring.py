# SPDX-License-Identifier: Apache-2.0
"""How the benchmarks of files measure: peak anonymous memory, and times of rivals taken in turns.

A disk and a page cache have good and bad minutes. So rivals run one after the other, again and again, and what counts
is the median of each and the ratio between them.
"""

from __future__ import annotations

import gc
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.measure import rss_anon

MIB = 1 << 20
GIB = 1 << 30
# What the system itself needs.
_MARGIN_BYTES = GIB


class PeakMemory:
    """Watches this process's anonymous memory while a block runs.

    Example:
        >>> with PeakMemory() as memory:
        ...     save(tensors, path)
        >>> memory.growth
    """

    def __init__(self, interval: float = 0.002) -> None:
        self.growth = 0
        self._interval = interval
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self._before = rss_anon()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._note()
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(self._interval):
            self._note()

    def _note(self) -> None:
        self.growth = max(self.growth, rss_anon() - self._before)


class FullPageCache:
    """Fills the free memory with another file, as on a machine in use: the rivals reuse memory of the page cache.

    The host of a virtual machine takes free memory back within seconds. To use such a page again can take several times
    as long as reading a file into it, and which rival gets it is chance. Memory that is not free is not taken back. So
    this holds the memory that the rivals do not need, and `refill()` has the page cache take the free rest.

    Args:
        needed: Bytes for the page cache and the rivals.
        folder: Where to write a file that is larger.

    Example:
        >>> with FullPageCache(4 * GIB, folder) as page_cache:
        ...     in_turns(rivals, 5, page_cache.refill)
    """

    def __init__(self, needed: int, folder: Path) -> None:
        self._needed = needed + _MARGIN_BYTES
        self._path = folder / "other-file"

    def __enter__(self) -> FullPageCache:
        rest = _kernel_bytes("MemAvailable") - self._needed
        if rest < 0:
            raise SystemExit(f"{-rest / GIB:.1f} GiB of memory are missing: choose smaller models")
        self._held = mmap.mmap(-1, rest, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        part = bytes(4 * MIB)
        with self._path.open("wb") as file:
            # If it fitted, the memory of a removed file would stay free.
            for _ in range(0, self._needed + _MARGIN_BYTES, len(part)):
                file.write(part)
            os.fsync(file.fileno())
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()
        self._path.unlink()

    def refill(self) -> None:
        """Read a file that is larger than the free memory."""
        read_files([self._path])


def read_files(paths: Sequence[Path]) -> None:
    """Read files, so that the page cache has them."""
    buffer = bytearray(8 * MIB)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _kernel_bytes(name: str) -> int:
    """Return a value of /proc/meminfo in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


class Turn(float):
    """How many seconds one run took on the clock, and how many of all processors together."""

    cpu_seconds: float


def in_turns(
    rivals: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[], object] = os.sync
) -> dict[str, list[Turn]]:
    """Return the time of each rival in each round; each round starts with a different rival.

    Args:
        rivals: What to measure.
        rounds: How often.
        before: Called before each measurement, untimed.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in rivals}
    names = list(rivals)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            before()
            start, cpu_start = time.perf_counter(), time.process_time()
            rivals[name]()
            turn = Turn(time.perf_counter() - start)
            turn.cpu_seconds = time.process_time() - cpu_start
            turns[name].append(turn)
    return turns


def show_rates(turns: Mapping[str, list[Turn]], nbytes: int, rival: str) -> None:
    """Print the median rate of each, its worst and best round, what a processor did, and the ratio to one of them."""
    reference = statistics.median(turns[rival])
    for name, taken in turns.items():
        rates = sorted(nbytes / turn / 1e9 for turn in taken)
        per_cpu = statistics.median(nbytes / turn.cpu_seconds / 1e9 for turn in taken)
        ratio = reference / statistics.median(taken)
        print(
            f"  {name:34} {statistics.median(rates):6.2f} GB/s  ({rates[0]:.2f} to {rates[-1]:.2f}),"
            f" {per_cpu:6.2f} GB a CPU second   {ratio:5.2f} × {rival}"
        )
