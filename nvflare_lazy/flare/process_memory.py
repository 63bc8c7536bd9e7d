# SPDX-License-Identifier: Apache-2.0
"""What this process has in memory, and giving back what it does not use."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

_STATUS = Path("/proc/self/status")
# From glibc's malloc.h: what the C library is told, and what each setting is for.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_SETTINGS = (
    # Threads that come share the arenas there are.
    ("MALLOC_ARENA_MAX", _M_ARENA_MAX, 2),
    # What is free at the end of an arena goes back at this size. Without, the C library raises it to 64 MiB by itself;
    # with less than this the buffers of each segment go back and are faulted in again, which takes as long as sending.
    ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, 8 << 20),
    # Where it would arrive by itself: setting one of the two fixes the other at what it happens to be.
    ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, 32 << 20),
)

# For a process that only passes messages on: each of their buffers goes back when it is freed. Faulting in the next one
# costs less here than where a tensor goes through several of them.
_SETTINGS_TO_FORWARD = (
    ("MALLOC_ARENA_MAX", _M_ARENA_MAX, 2),
    ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, 1 << 20),
    ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, 256 << 10),
)


def keep_little_free_memory(*, forwards_only: bool = False) -> None:
    """Tell the C library to give back what is freed.

    NVFlare moves tensors through hundreds of threads, in buffers of megabytes. What a thread frees stays in its arena
    for the next one that needs a buffer, which has another arena: so most of a gigabyte is free and not given back.
    What the environment says about it is left as it is.

    Args:
        forwards_only: Whether this process only passes messages on, and is to keep as good as nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        # Another C library than glibc keeps no such arenas.
        return
    for variable, setting, value in _SETTINGS_TO_FORWARD if forwards_only else _SETTINGS:
        if variable not in os.environ:
            mallopt(setting, value)


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
