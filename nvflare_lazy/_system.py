# SPDX-License-Identifier: Apache-2.0
"""Properties of this process and this machine: available cores, memory in use and mounted file systems."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_MOUNTS = Path("/proc/self/mountinfo")
_MEMORY = Path("/proc/meminfo")


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def leave_removed_directory() -> None:
    """Change to the root directory if the current one was removed; torch's libraries would end the process there.

    NVFlare's simulator imports the package that its setting `nvflare_decomposers` names in such a directory.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process in bytes, or 0 where the kernel does not report it."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def available_memory() -> int | None:
    """Return the memory of this machine that new processes can use, or None where the kernel does not report it."""
    try:
        for line in _MEMORY.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


@dataclass(frozen=True)
class Mount:
    """A mounted file system.

    Attributes:
        device: Its device as "major:minor".
        root: The directory of the file system that is mounted.
        point: The directory it is mounted on.
        kind: Its type as the kernel names it, for example "ext4".
        source: The device file, or another name of the source.
        options: Options of the file system, with "" for those without a value.
    """

    device: str
    root: str
    point: str
    kind: str
    source: str
    options: dict[str, str]


def mounts() -> list[Mount]:
    """Return the mounted file systems, those mounted last at the end; none where the kernel does not list them."""
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    return [mount for line in lines if (mount := _parse_mount(line))]


def mount_of(path: str) -> Mount | None:
    """Return the file system that an absolute path without symbolic links is on."""
    found = None
    for mount in mounts():
        above = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        # The longest mount point counts, and the last one mounted there.
        if above and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def _parse_mount(line: str) -> Mount | None:
    # id parent major:minor root mount-point options [optional fields] - type source super-options
    before, separator, after = line.partition(" - ")
    fields, tail = before.split(" "), after.split(" ")
    if not separator or len(fields) < 5 or len(tail) < 3:
        return None
    options = (option.partition("=")[::2] for option in tail[2].split(","))
    return Mount(
        fields[2],
        _unescape(fields[3]),
        _unescape(fields[4]),
        tail[0],
        _unescape(tail[1]),
        {name: _unescape(value) for name, value in options},
    )


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
