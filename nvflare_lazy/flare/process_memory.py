# SPDX-License-Identifier: Apache-2.0
"""What this process has in memory, and giving back what it does not use."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

_STATUS = Path("/proc/self/status")


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process in bytes, or 0 where the kernel does not tell."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def give_back_free_memory() -> None:
    """Return memory that was freed, and that the C library keeps, to the system. Costs a few milliseconds."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        # Another C library than glibc keeps no such arenas.
        return
