# SPDX-License-Identifier: Apache-2.0
"""Settings of glibc's malloc, so that freed memory returns to the system.

`TensorOffload` uses them in server and client job processes, where NVFlare moves tensors through many threads, and
`install()` in training scripts.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from typing import Literal

from nvflare_lazy._system import anonymous_bytes

#: What a process does: tensors pass through it, it only forwards messages, or it trains.
Purpose = Literal["stream", "forward", "train"]

# Parameters of glibc's malloc.h, and the reason for each setting.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# New threads share the existing arenas.
_FEW_ARENAS = ("MALLOC_ARENA_MAX", _M_ARENA_MAX, 2)
_SETTINGS: dict[Purpose, tuple[tuple[str, int, int], ...]] = {
    "stream": (
        _FEW_ARENAS,
        # An arena returns the free memory at its end from this size. Without the setting, glibc raises it to 64 MiB.
        # With a smaller one, the buffers of each segment are returned and faulted in again, which takes as long as
        # sending.
        ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, 8 << 20),
        # Whole tensors in NVFlare's format are returned at once. Segments are well below this size.
        ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, 4 << 20),
    ),
    # Each buffer is returned when it is freed. Faulting in the next one costs less here than in a process where a
    # tensor passes through several buffers.
    "forward": (
        _FEW_ARENAS,
        ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, 1 << 20),
        ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, 256 << 10),
    ),
    # The largest thresholds that glibc adapts to by itself. With those above, a training step on the CPU with
    # activations of 8 MiB took a quarter more processor time, because each was faulted in again.
    "train": (
        _FEW_ARENAS,
        ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, 64 << 20),
        ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, 32 << 20),
    ),
}

# For a process whose arenas keep too much memory: `malloc_trim` does not return the free memory at their ends, and
# there are more arenas than the setting above allows if threads were started before it. An arena returns its end when
# the next buffer in it is freed, so a short time suffices.
_STRICT_SETTINGS = (("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, 1 << 20),)

_STRICT_SECONDS = 0.25


def tune_malloc(purpose: Purpose) -> None:
    """Make the C library return freed memory to the system.

    NVFlare moves tensors through hundreds of threads, in buffers of megabytes. A freed buffer stays in the arena of its
    thread, while the next thread uses another arena: most of a gigabyte is then free and not returned. Settings in the
    environment take precedence.

    Args:
        purpose: What this process does.

    Example:
        >>> tune_malloc("stream")  # in a training script that loads and writes one tensor at a time
    """
    _set_mallopt(_SETTINGS[purpose])


def _set_mallopt(settings: tuple[tuple[str, int, int], ...]) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        # Other C libraries than glibc have no such arenas.
        return
    for variable, setting, value in settings:
        if variable not in os.environ:
            mallopt(setting, value)


class MallocTrimmer:
    """Returns free memory to the system when the process has grown by more than a limit.

    Each thread that forwards whole tensors leaves buffers of megabytes in its arena, where few other threads reuse
    them. Faulting them in again takes time, so they are only returned above the limit.

    Args:
        room: The number of bytes by which the process may grow.
        purpose: The argument of `tune_malloc` for this process.
    """

    def __init__(self, room: int, purpose: Purpose) -> None:
        self._room = room
        self._purpose = purpose
        self._lock = threading.Lock()
        self._idle_bytes = anonymous_bytes()
        self._limit = self._idle_bytes + room
        self._strict_since = 0.0

    def trim_idle(self) -> None:
        """Return all free memory while no transfer is running, and start to keep buffers again."""
        with self._lock:
            trim_malloc()
            self._keep_buffers()
            self._idle_bytes = min(self._idle_bytes, anonymous_bytes())
            self._limit = self._idle_bytes + self._room

    def trim_excess(self) -> None:
        """Return free memory if the process is above its limit; takes microseconds if it is not."""
        too_much = anonymous_bytes() > self._limit
        if not (too_much or self._strict_since) or not self._lock.acquire(blocking=False):
            return
        try:
            if too_much:
                _set_mallopt(_STRICT_SETTINGS)
                self._strict_since = time.monotonic()
                _trim()
                # The rest is in use, so trying again soon would not help.
                self._limit = max(self._limit, anonymous_bytes() + self._room // 4)
            elif time.monotonic() - self._strict_since > _STRICT_SECONDS:
                self._keep_buffers()
        finally:
            self._lock.release()

    def _keep_buffers(self) -> None:
        if self._strict_since:
            self._strict_since = 0.0
            tune_malloc(self._purpose)


def trim_malloc() -> None:
    """Collect garbage and return free memory to the system. Takes a few milliseconds."""
    gc.collect()
    _trim()


def _trim() -> None:
    """Return the free memory of all arenas to the system."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        # Other C libraries than glibc have no such arenas.
        return
