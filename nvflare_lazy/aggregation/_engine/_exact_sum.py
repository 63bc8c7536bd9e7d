# SPDX-License-Identifier: Apache-2.0
"""Weighted sums of a few elements in twice the precision of float64, and the processor's inexact flag.

The mean uses these sums for elements whose rounding its plain sum cannot decide. Every CPU keeps the flag at no cost,
one per thread, as IEEE 754 requires. If the flag is still clear after a tile was summed, all its sums are exact;
nothing else shows that as cheaply.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import platform
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from nvflare_lazy.aggregation._engine.rounding import FLOATS, NARROW

if TYPE_CHECKING:
    from collections.abc import Callable

# FE_INEXACT of <fenv.h>.
_MASKS = {"x86_64": 0x20, "AMD64": 0x20, "aarch64": 0x10, "arm64": 0x10}

# Sign and magnitude of a factor whose product with 24 bits is exact.
_HALF_BITS = 29
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ExactSum:
    """Sums of `count` elements.

    Attributes:
        high: The sums in float64.
        low: The remainder that `high` does not hold.
        doubt: Upper bound of the error of both together.
    """

    def __init__(self, count: int) -> None:
        self.high, self.low, self.doubt = (torch.zeros(count, dtype=torch.float64) for _ in range(3))
        self._terms = 0

    def add(self, values: torch.Tensor, factor: Fraction) -> None:
        """Add values times a factor."""
        wide = values.double()
        bits = significant_bits(values.dtype)
        is_whole = factor.denominator == 1 and factor.numerator.bit_length() + bits <= 53
        for part in (float(factor),) if is_whole else halves(factor):
            if part:
                self._add(wide * part, is_exact=is_whole or bits + _HALF_BITS <= 53)

    def _add(self, term: torch.Tensor, *, is_exact: bool) -> None:
        # Knuth's TwoSum: `error` is exactly the rounding error of the sum.
        total = self.high + term
        added = total - self.high
        error = (self.high - (total - added)) + (term - added)
        self.high = total
        self.low += error
        # The remainder is itself summed with rounding.
        self._terms += 1
        self.doubt += error.abs() * (4 * self._terms * 2.0**-53)
        if not is_exact:
            self.doubt += term.abs() * 2.0**-52

    def finish(self) -> None:
        """Move as much of the remainder as possible into `high`."""
        # An infinite sum has no remainder.
        self.low.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self.doubt.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        total = self.high + self.low
        self.low -= (total - self.high).nan_to_num_(nan=0.0)
        self.high = total

    def minus(self, numbers: torch.Tensor, total: Fraction) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums minus numbers times a total, and which of these differences have an unknown sign.

        Args:
            numbers: Numbers close to the sums divided by the total. They have few bits, or are halves of integers if
                the sums are integers below 2 ** 51.
            total: The factor of the numbers.
        """
        doubt = self.doubt
        if total.denominator == 1 and total.numerator.bit_length() <= 40:
            difference = self.high - numbers * float(total)
        else:
            high, low = halves(total)
            difference = self.high - numbers * high - numbers * low
            is_short = (numbers == numbers.float().double()).all()
            doubt = doubt + self.high.abs() * (2.0**-78 if is_short else 2.0**-48)
        difference += self.low
        return difference, (difference.abs() <= doubt) & (doubt > 0)


def significant_bits(dtype: torch.dtype) -> int:
    """Return the maximum number of significant bits of a dtype."""
    if dtype in FLOATS:
        return 11 if dtype in NARROW else 24 if dtype == torch.float32 else 53
    return torch.iinfo(dtype).bits


def halves(number: Fraction) -> tuple[float, float]:
    """Return two numbers whose sum is nearly `number`; the product of the first one with 24 bits is exact."""
    mantissa, exponent = math.frexp(float(number))
    # Truncated, not rounded: with parts of different signs, infinity times the parts would add up to NaN.
    high = math.ldexp(int(math.ldexp(mantissa, _HALF_BITS)), exponent - _HALF_BITS)
    return high, float(number - Fraction(high))


def as_python(values: torch.Tensor) -> list[Any]:
    """Return numbers of any dtype as exact Python numbers."""
    if values.dtype in FLOATS:
        return list(values.double().tolist())
    signed = values.view(_SIGNED[values.itemsize]).tolist()
    if torch.iinfo(values.dtype).min < 0:
        return list(signed)
    return [value % (1 << (8 * values.itemsize)) for value in signed]


def from_python(numbers: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return integers as a tensor of any integer dtype."""
    half = 1 << (8 * dtype.itemsize - 1)
    wrapped = [(number + half) % (2 * half) - half for number in numbers]
    return torch.tensor(wrapped, dtype=_SIGNED[dtype.itemsize]).view(dtype)


def pick(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return some elements of a tensor of any dtype."""
    return values.view(_SIGNED[values.itemsize])[places].view(values.dtype)


def put(values: torch.Tensor, places: torch.Tensor, picked: torch.Tensor) -> None:
    """Set some elements of a tensor of any dtype."""
    values.view(_SIGNED[values.itemsize])[places] = picked.view(_SIGNED[values.itemsize])


def round_to_odd(value: Fraction) -> float:
    """Return a float64 next to `value` that rounds to every narrower dtype as `value` itself does."""
    nearest = value.numerator / value.denominator
    error = value - Fraction(nearest)
    if error == 0 or math.frexp(nearest)[0] * 2**53 % 2 == 1:
        return nearest
    return math.nextafter(nearest, math.inf if error > 0 else -math.inf)


class InexactFlag:
    """The inexact flag of the calling thread."""

    def __init__(self, mask: int, clear: Callable[[int], int], test: Callable[[int], int]) -> None:
        self._mask = mask
        self._clear = clear
        self._test = test

    def clear(self) -> None:
        """Clear the flag."""
        self._clear(self._mask)

    def is_up(self) -> bool:
        """Whether an operation since the last `clear` had to round."""
        return bool(self._test(self._mask))


def inexact_flag() -> InexactFlag | None:
    """Return the flag, or None if it is not available or does not cover all computations of torch.

    It covers them only if torch computes on the calling thread alone, after `torch.set_num_threads(1)` in that thread.
    """
    return _flag() if torch.get_num_threads() == 1 else None


@cache
def _flag() -> InexactFlag | None:
    mask = _MASKS.get(platform.machine())
    if mask is None:
        return None
    try:
        # PyDLL keeps the interpreter's lock: acquiring it again takes much longer than the call.
        libm = ctypes.PyDLL(ctypes.util.find_library("m") or "libm.so.6")
        flag = InexactFlag(mask, libm.feclearexcept, libm.fetestexcept)
    except (OSError, AttributeError):
        return None
    return flag if _works(flag) else None


def _works(flag: InexactFlag) -> bool:
    # Short enough for torch to compute on this thread with any setting.
    one, small = torch.ones(259, dtype=torch.float64), torch.zeros(259, dtype=torch.float64)
    seen = []
    for last in (0.0, 2.0**-60, 0.0):
        small[-1] = last
        flag.clear()
        torch.add(one, small)
        seen.append(flag.is_up())
    return seen == [False, True, False]
