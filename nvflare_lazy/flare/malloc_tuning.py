# SPDX-License-Identifier: Apache-2.0
"""What this process has in memory, and giving back what it does not use."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time

from nvflare_lazy._system import anonymous_bytes

# From glibc's malloc.h: what the C library is told, and what each setting is for.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_SETTINGS = (
    # Threads that come share the arenas there are.
    ("MALLOC_ARENA_MAX", _M_ARENA_MAX, 2),
    # What is free at the end of an arena goes back at this size. Without, the C library raises it to 64 MiB by itself;
    # with less than this the buffers of each segment go back and are faulted in again, which takes as long as sending.
    ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, 8 << 20),
    # Whole tensors of peers without this package go back at once. Segments stay below it, with room to spare.
    ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, 4 << 20),
)

# For a process that only passes messages on: each of their buffers goes back when it is freed. Faulting in the next one
# costs less here than where a tensor goes through several of them.
_SETTINGS_TO_FORWARD = (
    ("MALLOC_ARENA_MAX", _M_ARENA_MAX, 2),
    ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, 1 << 20),
    ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, 256 << 10),
)

# For a process whose arenas keep too much: `malloc_trim` does not give back what is free at their ends, and there are
# more of them than the setting above says if there were many threads before it. Each gives its end back when the next
# buffer is freed in it, so that this need not last.
_KEEP_LITTLE = (("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, 1 << 20),)

_STRICT_SECONDS = 0.25


def tune_malloc(*, forwards_only: bool = False) -> None:
    """Tell the C library to give back what is freed.

    NVFlare moves tensors through hundreds of threads, in buffers of megabytes. What a thread frees stays in its arena
    for the next one that needs a buffer, which has another arena: so most of a gigabyte is free and not given back.
    What the environment says about it is left as it is.

    Args:
        forwards_only: Whether this process only passes messages on, and is to keep as good as nothing.
    """
    _tell_malloc(_SETTINGS_TO_FORWARD if forwards_only else _SETTINGS)


def _tell_malloc(settings: tuple[tuple[str, int, int], ...]) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        # Another C library than glibc keeps no such arenas.
        return
    for variable, setting, value in settings:
        if variable not in os.environ:
            mallopt(setting, value)


class MallocTrimmer:
    """Gives back what is free when the process has grown by more than what it may have in use.

    Each thread that passes whole tensors on leaves buffers of megabytes behind, where few others take them from. To
    fault them in again takes time, so they are given back only when they are too many.

    Args:
        room: By how many bytes the process may grow.
        forwards_only: As `tune_malloc` was told.
    """

    def __init__(self, room: int, *, forwards_only: bool = False) -> None:
        self._room = room
        self._forwards_only = forwards_only
        self._lock = threading.Lock()
        self._rest = anonymous_bytes()
        self._line = self._rest + room
        self._strict_since = 0.0

    def note_rest(self) -> None:
        """Nothing is under way: give everything back, and keep buffers again from here."""
        with self._lock:
            trim_malloc()
            self._keep_buffers()
            self._rest = min(self._rest, anonymous_bytes())
            self._line = self._rest + self._room

    def look(self) -> None:
        """Give back what is free, if it is too much; costs next to nothing if it is not."""
        too_much = anonymous_bytes() > self._line
        if not (too_much or self._strict_since) or not self._lock.acquire(blocking=False):
            return
        try:
            if too_much:
                _tell_malloc(_KEEP_LITTLE)
                self._strict_since = time.monotonic()
                _trim()
                # What is left is in use, and to try again soon would be in vain.
                self._line = max(self._line, anonymous_bytes() + self._room // 4)
            elif time.monotonic() - self._strict_since > _STRICT_SECONDS:
                self._keep_buffers()
        finally:
            self._lock.release()

    def _keep_buffers(self) -> None:
        if self._strict_since:
            self._strict_since = 0.0
            tune_malloc(forwards_only=self._forwards_only)


def trim_malloc() -> None:
    """Return memory that was freed, and that the C library keeps, to the system. Costs a few milliseconds."""
    gc.collect()
    _trim()


def _trim() -> None:
    """Return what the C library keeps free to the system, of all arenas."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        # Another C library than glibc keeps no such arenas.
        return
