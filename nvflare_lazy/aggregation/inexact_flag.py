# SPDX-License-Identifier: Apache-2.0
"""The processor's own note that a floating-point operation had to round.

Every CPU keeps it for free, one for each thread, as IEEE 754 asks. Summing a tile and finding the flag still down
proves that all its sums are exact, which is what a correctly rounded mean needs to know; nothing else tells so cheaply.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# FE_INEXACT of <fenv.h>.
_MASKS = {"x86_64": 0x20, "AMD64": 0x20, "aarch64": 0x10, "arm64": 0x10}


class InexactFlag:
    """The flag of the thread that asks."""

    def __init__(self, mask: int, clear: Callable[[int], int], test: Callable[[int], int]) -> None:
        self._mask = mask
        self._clear = clear
        self._test = test

    def clear(self) -> None:
        """Take the flag down."""
        self._clear(self._mask)

    def is_up(self) -> bool:
        """Whether an operation since the last `clear` had to round."""
        return bool(self._test(self._mask))


def inexact_flag() -> InexactFlag | None:
    """Return the flag, or None where it cannot be had or does not tell of all that torch computes.

    It does only where torch computes on the calling thread alone, after `torch.set_num_threads(1)` in it.
    """
    return _flag() if torch.get_num_threads() == 1 else None


@cache
def _flag() -> InexactFlag | None:
    mask = _MASKS.get(platform.machine())
    if mask is None:
        return None
    try:
        # Without letting go of the interpreter: getting it back from another thread takes much longer than the call.
        libm = ctypes.PyDLL(ctypes.util.find_library("m") or "libm.so.6")
        flag = InexactFlag(mask, libm.feclearexcept, libm.fetestexcept)
    except (OSError, AttributeError):
        return None
    return flag if _works(flag) else None


def _works(flag: InexactFlag) -> bool:
    # Short enough for torch to compute on this thread, whatever its settings.
    one, small = torch.ones(259, dtype=torch.float64), torch.zeros(259, dtype=torch.float64)
    seen = []
    for last in (0.0, 2.0**-60, 0.0):
        small[-1] = last
        flag.clear()
        torch.add(one, small)
        seen.append(flag.is_up())
    return seen == [False, True, False]
