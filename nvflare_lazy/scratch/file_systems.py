# SPDX-License-Identifier: Apache-2.0
"""What kind of disk a directory is on: memory that only looks like one is of no use to a program that saves memory.

Asked when a job opens its scratch, and by whoever wants to know beforehand whether a scratch root will do.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from nvflare_lazy.tensors.sizes import format_size

_MOUNTS = Path("/proc/self/mountinfo")
_MEMORY = {"tmpfs", "ramfs", "rootfs", "devtmpfs", "hugetlbfs"}
_MEMORY_DEVICE = re.compile(r"/dev/(zram|ram)\d+")
# Only one kernel writes to these, so its locks prove who lives; every other kind may be shared between hosts.
_LOCAL = _MEMORY | {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay", "apfs", "hfs"}
# These set space aside in one step; elsewhere the C library would write zeros.
_PREALLOCATING = {"ext4", "xfs", "btrfs", "f2fs", "tmpfs"}


@dataclass(frozen=True)
class RootReport:
    """What a scratch root is on."""

    path: Path
    """The directory, or the nearest one above it if it does not exist yet."""
    file_system: str
    """Its type as the kernel names it, or "unknown"."""
    memory_backed: bool
    """Whether what is written there takes up memory."""
    shared: bool
    """Whether other hosts may be writing to it."""
    free: int
    """Bytes this user may still write."""
    total: int
    """Bytes the file system has."""
    writable: bool
    """Whether this user may write there."""

    @property
    def preallocates(self) -> bool:
        """Whether setting space aside is cheap."""
        return self.file_system in _PREALLOCATING

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with this place, each with what to do."""
        found = []
        if self.memory_backed:
            found.append(
                f"{self.path} is on {self.file_system}, which is memory: whatever is received there takes as much "
                f"memory as it has bytes ({format_size(self.total)} at most). Set NVFLARE_LAZY_SCRATCH, or the "
                "scratch root in the job, to a directory on a disk"
            )
        if not self.writable:
            found.append(
                f"{self.path} cannot be written to by this user. Set NVFLARE_LAZY_SCRATCH, or the scratch root in the "
                "job, to a directory that can"
            )
        return tuple(found)


@dataclass(frozen=True)
class _Mount:
    point: str
    kind: str
    source: str
    options: dict[str, str]


def describe_root(path: str | os.PathLike[str]) -> RootReport:
    """Say what a directory is on; it need not exist yet, and nothing is made.

    Example:
        >>> describe_root("/proc").memory_backed
        False
    """
    place = os.path.realpath(path)
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    disk = os.statvfs(place)
    mount = _mount_of(place, _mounts())
    return RootReport(
        path=Path(place),
        file_system=mount.kind if mount else "unknown",
        memory_backed=mount is not None and _is_memory(mount),
        shared=(mount.kind not in _LOCAL) if mount else sys.platform == "linux",
        free=disk.f_bavail * disk.f_frsize,
        total=disk.f_blocks * disk.f_frsize,
        writable=os.access(place, os.W_OK | os.X_OK),
    )


def _mounts() -> list[_Mount]:
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    return [mount for line in lines if (mount := _parsed(line))]


def _parsed(line: str) -> _Mount | None:
    # id parent major:minor root mount-point options [optional fields] - type source super-options
    before, separator, after = line.partition(" - ")
    fields, tail = before.split(" "), after.split(" ")
    if not separator or len(fields) < 5 or len(tail) < 3:
        return None
    options = dict(option.partition("=")[::2] for option in tail[2].split(","))
    return _Mount(_unescaped(fields[4]), tail[0], _unescaped(tail[1]), options)


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _mount_of(place: str, mounts: list[_Mount]) -> _Mount | None:
    """Return the mount a path is on: the longest mount point above it, the last one mounted there."""
    found = None
    for mount in mounts:
        above = place == mount.point or place.startswith(mount.point.rstrip("/") + "/")
        if above and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def _is_memory(mount: _Mount) -> bool:
    if mount.kind in _MEMORY or _MEMORY_DEVICE.fullmatch(mount.source):
        return True
    upper = mount.options.get("upperdir") if mount.kind == "overlay" else None
    # In a container the upper directory is usually out of sight; what lies there is then unknown.
    if upper is None or not os.path.isdir(_unescaped(upper)):
        return False
    below = _mount_of(os.path.realpath(_unescaped(upper)), _mounts())
    return below is not None and below.kind != "overlay" and _is_memory(below)
