# SPDX-License-Identifier: Apache-2.0
"""The limits of the container that this process runs in, and whether a job stays within them.

`TensorOffload` warns at the start of a job, and `nvflare-lazy doctor` reports the limits.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nvflare_lazy._system import Mount, available_memory, mount_of, mounts
from nvflare_lazy._text import format_size, parse_size
from nvflare_lazy.errors import ScratchError
from nvflare_lazy.scratch.file_systems import inspect_root

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: The limit of `ephemeral-storage` of a Kubernetes pod, which the kernel does not know.
STORAGE_LIMIT = "NVFLARE_LAZY_STORAGE_LIMIT"
_GROUPS = Path("/proc/self/cgroup")
_EMPTY_DIR = "kubernetes.io~empty-dir"
# Version 1 has a number instead of "max", the largest multiple of the page size.
_MIN_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class MemoryLimit:
    """The lowest memory limit of the memory cgroups that this process is in.

    Attributes:
        nbytes: The limit.
        in_use: Memory of the processes in that group, and files in memory. Page cache is not included: it counts
            towards the limit, and the kernel frees it before it ends a process.
        path: The file with the limit.
    """

    nbytes: int
    in_use: int
    path: Path


def memory_limit() -> MemoryLimit | None:
    """Return the lowest memory limit of this process, from cgroups of version 1 or 2, or None without a limit.

    Groups above the visible ones have limits that a container cannot read, except with version 1.
    """
    try:
        lines = _GROUPS.read_text().splitlines()
    except OSError:
        return None
    groups = {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}
    found: list[MemoryLimit] = []
    for mount in mounts():
        if mount.kind == "cgroup2" and "" in groups:
            found += _limits_2(mount, groups[""])
        elif mount.kind == "cgroup" and "memory" in mount.options and "memory" in groups:
            found += _limits_1(mount, groups["memory"])
    return min(found, key=lambda limit: limit.nbytes, default=None)


def storage_limit() -> int | None:
    """Return the limit of `ephemeral-storage` in `NVFLARE_LAZY_STORAGE_LIMIT`, or None if it is not set.

    Raises:
        ScratchError: It is not a size.
    """
    text = os.environ.get(STORAGE_LIMIT)
    if not text:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise ScratchError(f"{STORAGE_LIMIT}: {error}") from None


def find_shortages(memory: int, storage: Mapping[Path, int]) -> list[str]:
    """Return what a job needs and does not get here, in a sentence for each limit or machine that is too small.

    Args:
        memory: Memory that the job needs in addition to the memory in use.
        storage: Bytes that the job will write below each of these directories.
    """
    found = []
    disks: dict[int, dict[Path, int]] = defaultdict(dict)
    ephemeral = 0
    for directory, nbytes in storage.items():
        root = inspect_root(directory)
        if root.memory_backed:
            memory += nbytes
            continue
        disk = disks[os.stat(root.path).st_dev]
        disk[root.path] = disk.get(root.path, 0) + nbytes
        ephemeral += nbytes if _is_ephemeral(root.path) else 0
    limit = memory_limit()
    if limit is not None and limit.in_use + memory > limit.nbytes:
        found.append(
            f"the memory limit of {format_size(limit.nbytes)} in {limit.path} is lower than the job needs: "
            f"{format_size(limit.in_use)} are in use, page cache not included, and {format_size(memory)} more are "
            f"needed, {format_size(limit.in_use + memory - limit.nbytes)} too many; raise it"
        )
    available = available_memory()
    if available is not None and memory > available:
        found.append(
            f"this machine has {format_size(available)} of memory available, and the job needs {format_size(memory)}, "
            f"{format_size(memory - available)} too much; end other processes, or use a machine with more memory"
        )
    for wanted in disks.values():
        free, total = inspect_root(next(iter(wanted))).free, sum(wanted.values())
        if total > free:
            found.append(
                f"the disk of {' and '.join(map(str, wanted))} has {format_size(free)} free, and the job needs "
                f"{format_size(total)}, {format_size(total - free)} too much; free space, or use another disk"
            )
    allowed = storage_limit()
    if allowed is not None and ephemeral > allowed:
        found.append(
            f"the ephemeral-storage limit of {format_size(allowed)} is lower than the job needs: "
            f"{format_size(ephemeral)}. Kubernetes evicts a pod that uses more; raise it, or use a volume"
        )
    return found


def _is_ephemeral(path: Path) -> bool:
    """Whether files count towards `ephemeral-storage`: those of the container itself and in an `emptyDir`."""
    mount = mount_of(os.path.realpath(path))
    return mount is None or mount.kind == "overlay" or _EMPTY_DIR in mount.root


def _limits_2(mount: Mount, group: str) -> Iterator[MemoryLimit]:
    for directory in _directories(mount, group):
        text = _read(directory / "memory.max")
        if text.isdigit():
            used = _statistics(directory)
            yield MemoryLimit(int(text), used.get("anon", 0) + used.get("shmem", 0), directory / "memory.max")


def _limits_1(mount: Mount, group: str) -> Iterator[MemoryLimit]:
    lowest = _MIN_UNLIMITED
    for directory in _directories(mount, group):
        used = _statistics(directory)
        in_use = used.get("total_rss", 0) + used.get("total_shmem", 0)
        text = _read(directory / "memory.limit_in_bytes")
        if text.isdigit() and int(text) < lowest:
            lowest = int(text)
            yield MemoryLimit(lowest, in_use, directory / "memory.limit_in_bytes")
    # Of the uppermost visible group: the lowest limit of the groups above it.
    inherited = used.get("hierarchical_memory_limit", _MIN_UNLIMITED)
    if inherited < lowest:
        yield MemoryLimit(inherited, in_use, directory / "memory.stat")


def _directories(mount: Mount, group: str) -> Iterator[Path]:
    """Yield the visible directories of a group and of those above it."""
    top = Path(mount.point)
    # Without a namespace, a container sees its own group as the root of the mount.
    root = mount.root.rstrip("/")
    inside = group[len(root) :] if f"{group}/".startswith(f"{root}/") else ""
    directory = top / inside.strip("/") if ".." not in Path(inside).parts else top
    yield directory
    while directory != top:
        directory = directory.parent
        yield directory


def _statistics(directory: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(directory / "memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
