# SPDX-License-Identifier: Apache-2.0
"""`MemoryGroup`: a limit on the memory of a group of processes together, page cache included."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A memory cgroup of Linux, version 1 or 2, with a limit; it exists until it is left.

    The kernel counts anonymous memory and the page cache of the processes. At the limit it frees page cache, and if
    that is not enough, it kills a process of the group.

    Args:
        limit: Maximum bytes.

    Raises:
        OSError: No writable hierarchy of memory cgroups exists; root usually has one.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._name = f"nvflare-lazy-{os.getpid()}-{time.monotonic_ns()}"

    def __enter__(self) -> MemoryGroup:
        reasons = []
        for version, parent in _possible_parents():
            self._path, self._version = parent / self._name, version
            limit, no_swap = (
                ("memory.limit_in_bytes", ("memory.memsw.limit_in_bytes", self.limit))
                if version == 1
                else ("memory.max", ("memory.swap.max", 0))
            )
            try:
                self._path.mkdir()
                self._write(limit, self.limit)
            except OSError as error:
                reasons.append(str(error))
                with suppress(OSError):
                    self._path.rmdir()
                continue
            # Kernels without accounting of swap do not have this file.
            with suppress(OSError):
                self._write(*no_swap)
            return self
        raise OSError(f"cannot make a memory cgroup ({'; '.join(reasons) or 'none is mounted'}); run as root")

    def __exit__(self, *error: object) -> None:
        # The kernel refuses while the last process is ending.
        deadline = time.monotonic() + 30
        while True:
            try:
                return self._path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def add(self, pid: int) -> None:
        """Move a process into the group, with the memory that it allocates afterwards."""
        self._write("cgroup.procs", pid)

    def enter(self) -> None:
        """Move the calling process into the group; a `preexec_fn`."""
        self.add(os.getpid())

    @property
    def peak(self) -> int:
        """Maximum bytes so far, page cache included."""
        name = "memory.max_usage_in_bytes" if self._version == 1 else "memory.peak"
        return int((self._path / name).read_text())

    @property
    def anonymous(self) -> int:
        """Bytes of anonymous memory now."""
        return self._number("memory.stat", "rss" if self._version == 1 else "anon")

    @property
    def killed(self) -> int:
        """Number of processes that the kernel killed at the limit."""
        return self._number("memory.oom_control" if self._version == 1 else "memory.events", "oom_kill")

    def _write(self, name: str, value: int) -> None:
        (self._path / name).write_text(str(value))

    def _number(self, file: str, name: str) -> int:
        fields = dict(line.split() for line in (self._path / file).read_text().splitlines())
        return int(fields[name])


def _possible_parents() -> Iterator[tuple[int, Path]]:
    """Yield version and directory of the cgroups in which a group can be made: this process's own, then those above."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if "memory" in controllers.split(","):
            version, mount = 1, _MOUNT / "memory"
        elif not controllers:
            version, mount = 2, _MOUNT if (_MOUNT / "cgroup.controllers").exists() else _MOUNT / "unified"
        else:
            continue
        path = mount / own.lstrip("/")
        for parent in (path, *path.parents):
            if parent.exists():
                yield version, parent
            if parent == mount:
                break
