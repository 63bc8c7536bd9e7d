# SPDX-License-Identifier: Apache-2.0
"""Settings of glibc's malloc and a bound on the free memory that it keeps.

`TensorOffload` uses them in server and client job processes, where NVFlare moves tensors through many threads, and
`install()` in training scripts.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from typing import Any

from nvflare_lazy._system import anonymous_bytes

# Parameters of glibc's malloc.h, and the reason for each setting.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_SETTINGS = (
    # New threads share the existing arenas.
    ("MALLOC_ARENA_MAX", _M_ARENA_MAX, 2),
    # The largest thresholds that glibc's own adaptation reaches. With smaller ones, buffers are returned to the system
    # and faulted in again with each message: a server process took up to 60 % more processor time, and a training step
    # on the CPU with activations of 8 MiB a quarter more.
    ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, 64 << 20),
    ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, 32 << 20),
)
# For a process that moves its tensors to disk one by one: the next tensors are too large for the freed buffers.
_WITHOUT_BUFFERS = (
    ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, 1 << 20),
    ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, 256 << 10),
)
_ALL_ARENAS_OF_JEMALLOC = 4096
# `malloc_trim` does not return the free memory at the ends of arenas. An arena returns its end when the next buffer in
# it is freed, if that is above a threshold. So the threshold is low for some releases.
_LOW_THRESHOLD = ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, 1 << 20)
_RELEASES_WITH_LOW_THRESHOLD = 4
# The buffers of a process with models in memory are between them. With less room, four clients without this package
# made a server fault in memory four times as often.
_MAX_GROWTH = 3


def tune_malloc(*, keep_buffers: bool = True) -> None:
    """Make the threads of this process share the memory that they free.

    NVFlare moves tensors through hundreds of threads, in buffers of megabytes. A freed buffer stays in the arena of its
    thread, while the next thread uses another arena: most of a gigabyte is then free and not used again. Settings in
    the environment take precedence. Other allocators, such as jemalloc, are not affected.

    Args:
        keep_buffers: Whether freed buffers are kept for the next ones; otherwise, each is returned to the system.
    """
    _set_mallopt(_SETTINGS if keep_buffers else _WITHOUT_BUFFERS)


def _set_mallopt(settings: tuple[tuple[str, int, int], ...]) -> None:
    mallopt = _c_function("mallopt")
    for variable, setting, value in settings if mallopt else ():
        if variable not in os.environ:
            mallopt(setting, value)


class MallocTrimmer:
    """Returns free memory to the system if the process takes more than it used at most so far, and a limit beyond that.

    A buffer that is kept costs nothing when it is used again, and one that was returned is faulted in again, page by
    page.

    Args:
        room: The number of bytes of free memory to keep. A process that uses more memory keeps up to half of that, and
            at most three times as much.
    """

    def __init__(self, room: int) -> None:
        self._min_room = room
        self._lock = threading.Lock()
        self._used_at_start = self._most_used = _bytes_in_use()
        self._outside = anonymous_bytes() - self._used_at_start
        self._next_look = anonymous_bytes() + room
        self._releases_to_come = 0

    def trim_idle(self) -> None:
        """Collect garbage and return all free memory while no transfer is running."""
        with self._lock:
            gc.collect()
            _trim()
            self._outside = min(self._outside, anonymous_bytes() - _bytes_in_use())
            self._next_look = anonymous_bytes() + max(self._rest(), self._room() // 4)

    def trim_excess(self) -> None:
        """Return free memory if there is more than the limit; takes microseconds if there is not.

        Call it for each tensor whose buffers are released.
        """
        too_much = anonymous_bytes() > self._next_look
        if not (too_much or self._releases_to_come) or not self._lock.acquire(blocking=False):
            return
        try:
            if self._releases_to_come:
                self._releases_to_come -= 1
                if not self._releases_to_come:
                    tune_malloc()
            if not too_much:
                return
            rest = self._rest()
            if rest < 0:
                _set_mallopt((_LOW_THRESHOLD,))
                self._releases_to_come = _RELEASES_WITH_LOW_THRESHOLD
                _trim()
                # The rest may belong to another allocator, and trying again soon would not help.
                rest = max(self._rest(), self._room() // 4)
            self._next_look = anonymous_bytes() + rest
        finally:
            self._lock.release()

    def _rest(self) -> int:
        """Return by how many bytes the process can grow before malloc keeps too much."""
        self._most_used = max(self._most_used, _bytes_in_use())
        return self._outside + self._most_used + self._room() - anonymous_bytes()

    def _room(self) -> int:
        used = (self._most_used - self._used_at_start) // 2
        return min(max(self._min_room, used), _MAX_GROWTH * self._min_room)


def trim_malloc() -> None:
    """Collect garbage and return free memory to the system. Takes a few milliseconds."""
    gc.collect()
    _trim()


def _trim() -> None:
    """Return the free memory of all arenas to the system."""
    # With jemalloc preloaded, the functions of both are present, and glibc's functions have no effect.
    mallctl, malloc_trim = _c_function("mallctl"), _c_function("malloc_trim")
    if mallctl is not None:
        mallctl(f"arena.{_ALL_ARENAS_OF_JEMALLOC}.purge".encode(), None, None, None, ctypes.c_size_t(0))
    elif malloc_trim is not None:
        malloc_trim(0)


def _c_function(name: str) -> Any:
    """Return a function of the C library, or None: only glibc has these."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _bytes_in_use() -> int:
    """Return the bytes that malloc has handed out; 0 if the C library does not count them."""
    mallinfo2 = _c_function("mallinfo2")
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)
