# SPDX-License-Identifier: Apache-2.0
"""The file system of a directory: its type, and whether it is in memory, where scratch would save nothing.

`JobScratch.open` inspects its root, and so does `nvflare-lazy doctor`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from nvflare_lazy._system import Mount, mount_of
from nvflare_lazy._text import format_size

_MEMORY = {"tmpfs", "ramfs", "rootfs", "devtmpfs", "hugetlbfs"}
_MEMORY_DEVICE = re.compile(r"/dev/(zram|ram)\d+")
# These reserve space in one step; elsewhere the C library would write zeros.
_PREALLOCATING = {"ext4", "xfs", "btrfs", "f2fs", "tmpfs"}


@dataclass(frozen=True)
class RootInfo:
    """The file system of a scratch root."""

    path: Path
    """The directory, or the nearest one above it if it does not exist yet."""
    file_system: str
    """Its type as the kernel names it, or "unknown"."""
    memory_backed: bool
    """Whether files there take up memory."""
    free: int
    """Bytes this user may still write."""
    total: int
    """Size of the file system in bytes."""
    writable: bool
    """Whether this user may write there."""

    @property
    def preallocates(self) -> bool:
        """Whether reserving space is cheap."""
        return self.file_system in _PREALLOCATING

    @property
    def warnings(self) -> tuple[str, ...]:
        """The problems of this directory, each with its remedy."""
        found = []
        if self.memory_backed:
            found.append(
                f"{self.path} is on {self.file_system}, which is memory: received tensors there take up memory, up "
                f"to {format_size(self.total)}. Set NVFLARE_LAZY_SCRATCH, or the job's scratch_dir, to a directory on "
                "a disk"
            )
        if not self.writable:
            found.append(
                f"{self.path} is not writable for this user. Set NVFLARE_LAZY_SCRATCH, or the job's scratch_dir, to a "
                "directory that is"
            )
        return tuple(found)


def inspect_root(path: str | os.PathLike[str]) -> RootInfo:
    """Inspect the file system of a directory, which may not exist yet; create nothing.

    Example:
        >>> inspect_root("/proc").memory_backed
        False
    """
    directory = os.path.realpath(path)
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    disk = os.statvfs(directory)
    mount = mount_of(directory)
    return RootInfo(
        path=Path(directory),
        file_system=mount.kind if mount else "unknown",
        memory_backed=mount is not None and _is_memory(mount),
        free=disk.f_bavail * disk.f_frsize,
        total=disk.f_blocks * disk.f_frsize,
        writable=os.access(directory, os.W_OK | os.X_OK),
    )


def _is_memory(mount: Mount) -> bool:
    if mount.kind in _MEMORY or _MEMORY_DEVICE.fullmatch(mount.source):
        return True
    upper = mount.options.get("upperdir") if mount.kind == "overlay" else None
    # In a container the upper directory is usually out of sight; its file system is then unknown.
    if upper is None or not os.path.isdir(upper):
        return False
    below = mount_of(os.path.realpath(upper))
    return below is not None and below.kind != "overlay" and _is_memory(below)
