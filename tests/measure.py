# SPDX-License-Identifier: Apache-2.0
"""What a process has in memory and has read, as the kernel counts it (Linux)."""

from __future__ import annotations

from pathlib import Path


def rss_anon() -> int:
    """Bytes of anonymous memory resident in this process: the heap, without mapped files and page cache."""
    return _field("/proc/self/status", "RssAnon") * 1024


def rchar() -> int:
    """Bytes this process has asked the kernel to read so far, whether or not they came from a disk.

    Reads through a memory map are not in it.
    """
    return _field("/proc/self/io", "rchar")


def _field(path: str, name: str) -> int:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise LookupError(f"{path} has no field {name}")
