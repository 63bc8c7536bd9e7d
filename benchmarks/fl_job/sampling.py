# SPDX-License-Identifier: Apache-2.0
"""Memory, CPU and bytes of every process of a job over time, as the kernel counts them.

Anonymous memory (RssAnon) is what a process really takes from others; mapped files and the page cache are not in it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fl_job.network import loopback_bytes


@dataclass(frozen=True)
class Sample:
    """One process at one moment. Sizes are bytes; other counts and CPU seconds are totals since the process began.

    `written` is what the process gave to write calls, while `disk_written` has reached the disk. Both include children
    that have ended.
    """

    seconds: float
    role: str
    pid: int
    anon: int
    file: int
    disk_read: int
    disk_written: int
    written: int
    cpu: float


@dataclass(frozen=True)
class MachineSample:
    """The scratch, the page cache and loopback's traffic so far, in bytes; the last two are the whole machine's.

    After `separate_loopback`, the traffic is only that of the measured processes.
    """

    seconds: float
    scratch: int
    page_cache: int
    sockets: int


class Sampler:
    """Samples processes until it is left.

    Args:
        roles: Called now and then; returns the processes to watch, by process id, with the role each plays.
        interval: Seconds between two samples.
        scratch: Directories whose size on disk is also sampled, as a sum.
    """

    def __init__(self, roles: Callable[[], dict[int, str]], interval: float = 0.05, *scratch: Path) -> None:
        self.samples: list[Sample] = []
        self.machine_samples: list[MachineSample] = []
        self.started = time.time()
        self._roles = roles
        self._interval = interval
        self._scratch = scratch
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        looked = -1.0
        scratch = 0
        watched: dict[int, str] = {}
        while not self._end.wait(self._interval):
            now = time.time() - self.started
            if now - looked > 0.3:
                watched, looked = self._roles(), now
                scratch = sum(map(size_on_disk, self._scratch))
            self.machine_samples.append(MachineSample(now, scratch, page_cache(), loopback_bytes()))
            self.samples.extend(sample for pid, role in watched.items() if (sample := take(now, role, pid)) is not None)


def take(seconds: float, role: str, pid: int) -> Sample | None:
    """Sample one process; None when it is gone."""
    try:
        status = dict(_fields(Path(f"/proc/{pid}/status")))
        io = dict(_fields(Path(f"/proc/{pid}/io")))
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return Sample(
            seconds=seconds,
            role=role,
            pid=pid,
            anon=int(status["RssAnon"].split()[0]) * 1024,
            file=int(status["RssFile"].split()[0]) * 1024,
            disk_read=int(io["read_bytes"]),
            disk_written=int(io["write_bytes"]),
            written=int(io["wchar"]),
            cpu=sum(map(int, times)) / os.sysconf("SC_CLK_TCK"),
        )
    except (OSError, KeyError):
        return None


def page_cache() -> int:
    """Return the size of the machine's page cache."""
    return int(dict(_fields(Path("/proc/meminfo")))["Cached"].split()[0]) * 1024


def size_on_disk(directory: Path) -> int:
    """Return the bytes of the files below a directory; files that vanish during the count are ignored."""
    total = 0
    for path, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name), follow_symlinks=False).st_blocks * 512
            except OSError:
                continue
    return total


def descendants(root: int) -> Iterator[tuple[int, str]]:
    """Yield each process below `root`, and `root`, with its command line."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    pending = [root]
    while pending:
        pid = pending.pop()
        pending.extend(children.get(pid, ()))
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        yield pid, command


def _fields(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        yield name, value.strip()
