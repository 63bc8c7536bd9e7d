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

from nvflare_lazy._system import Mount, mount_of
from nvflare_lazy._text import format_size

_MEMORY = {"tmpfs", "ramfs", "rootfs", "devtmpfs", "hugetlbfs"}
_MEMORY_DEVICE = re.compile(r"/dev/(zram|ram)\d+")
# Only one kernel writes to these, so its locks prove who lives; every other kind may be shared between hosts.
_LOCAL = _MEMORY | {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay", "apfs", "hfs"}
# These set space aside in one step; elsewhere the C library would write zeros.
_PREALLOCATING = {"ext4", "xfs", "btrfs", "f2fs", "tmpfs"}


@dataclass(frozen=True)
class RootInfo:
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


def inspect_root(path: str | os.PathLike[str]) -> RootInfo:
    """Say what a directory is on; it need not exist yet, and nothing is made.

    Example:
        >>> inspect_root("/proc").memory_backed
        False
    """
    place = os.path.realpath(path)
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    disk = os.statvfs(place)
    mount = mount_of(place)
    return RootInfo(
        path=Path(place),
        file_system=mount.kind if mount else "unknown",
        memory_backed=mount is not None and _is_memory(mount),
        shared=(mount.kind not in _LOCAL) if mount else sys.platform == "linux",
        free=disk.f_bavail * disk.f_frsize,
        total=disk.f_blocks * disk.f_frsize,
        writable=os.access(place, os.W_OK | os.X_OK),
    )


def _is_memory(mount: Mount) -> bool:
    if mount.kind in _MEMORY or _MEMORY_DEVICE.fullmatch(mount.source):
        return True
    upper = mount.options.get("upperdir") if mount.kind == "overlay" else None
    # In a container the upper directory is usually out of sight; what lies there is then unknown.
    if upper is None or not os.path.isdir(upper):
        return False
    below = mount_of(os.path.realpath(upper))
    return below is not None and below.kind != "overlay" and _is_memory(below)
