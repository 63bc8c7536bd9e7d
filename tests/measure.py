# SPDX-License-Identifier: Apache-2.0
"""Memory, open files and bytes read of a process, as the kernel counts them (Linux)."""

from __future__ import annotations

import os
from pathlib import Path


def open_files() -> int:
    """Return the number of open descriptors of this process, without sockets.

    Clients of object stores keep connections, which may close in the middle of a later test.
    """
    count = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            count += not os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except FileNotFoundError:  # closed meanwhile, such as the descriptor that lists the directory
            continue
    return count


def rss_anon() -> int:
    """Bytes of anonymous memory resident in this process: the heap, without mapped files and page cache."""
    return _field("/proc/self/status", "RssAnon") * 1024


def rchar() -> int:
    """Bytes this process has asked the kernel to read so far, from a disk or from the cache.

    Reads through a memory map are not in it.
    """
    return _field("/proc/self/io", "rchar")


def _field(path: str, name: str) -> int:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise LookupError(f"{path} has no field {name}")
