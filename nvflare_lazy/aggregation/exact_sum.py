# SPDX-License-Identifier: Apache-2.0
"""Weighted sums of a few elements in twice the precision of float64, and in fractions where even that is not enough.

What a mean falls back on for the elements of a tile that its plain sum cannot decide.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch

from nvflare_lazy.aggregation.rounding import FLOATS, NARROW

# Sign and magnitude of a factor whose product with 24 bits is exact.
_HALF_BITS = 29
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ExactSum:
    """Sums of `count` elements.

    Attributes:
        high: The sums in float64.
        low: What is missing in them.
        doubt: How far from the truth both together can be.
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
        # Knuth's TwoSum: `error` is exactly what the sum rounds away.
        total = self.high + term
        added = total - self.high
        error = (self.high - (total - added)) + (term - added)
        self.high = total
        self.low += error
        # What is missing is itself summed with rounding.
        self._terms += 1
        self.doubt += error.abs() * (4 * self._terms * 2.0**-53)
        if not is_exact:
            self.doubt += term.abs() * 2.0**-52

    def finish(self) -> None:
        """Bring as much as possible into the sums."""
        # Next to infinity, nothing is missing.
        self.low.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self.doubt.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        total = self.high + self.low
        self.low -= (total - self.high).nan_to_num_(nan=0.0)
        self.high = total

    def minus(self, numbers: torch.Tensor, total: Fraction) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sums minus numbers times a total, and for which of these the sign is not known.

        Args:
            numbers: Close to the quotients of sums and total. Of few bits; or halves of whole numbers, if the sums are
                whole numbers below 2 ** 51.
            total: What they are multiplied by.
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
    """Return how many bits a number of a type has at most."""
    if dtype in FLOATS:
        return 11 if dtype in NARROW else 24 if dtype == torch.float32 else 53
    return torch.iinfo(dtype).bits


def halves(number: Fraction) -> tuple[float, float]:
    """Return two numbers whose sum this nearly is, the first with so few bits that 24 bits times it is exact."""
    mantissa, exponent = math.frexp(float(number))
    # Cut off, not rounded: with parts of different signs, infinity times them would have no sum.
    high = math.ldexp(int(math.ldexp(mantissa, _HALF_BITS)), exponent - _HALF_BITS)
    return high, float(number - Fraction(high))


def as_python(values: torch.Tensor) -> list[Any]:
    """Return numbers of any type as exact Python numbers."""
    if values.dtype in FLOATS:
        return list(values.double().tolist())
    signed = values.view(_SIGNED[values.itemsize]).tolist()
    if torch.iinfo(values.dtype).min < 0:
        return list(signed)
    return [value % (1 << (8 * values.itemsize)) for value in signed]


def from_python(numbers: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return whole numbers as a tensor of any integer type."""
    half = 1 << (8 * dtype.itemsize - 1)
    wrapped = [(number + half) % (2 * half) - half for number in numbers]
    return torch.tensor(wrapped, dtype=_SIGNED[dtype.itemsize]).view(dtype)


def pick(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return some elements of a tensor of any type."""
    return values.view(_SIGNED[values.itemsize])[places].view(values.dtype)


def put(values: torch.Tensor, places: torch.Tensor, picked: torch.Tensor) -> None:
    """Set some elements of a tensor of any type."""
    values.view(_SIGNED[values.itemsize])[places] = picked.view(_SIGNED[values.itemsize])


def round_to_odd(value: Fraction) -> float:
    """Return a number next to `value` that rounds to every narrower type as `value` itself would."""
    nearest = value.numerator / value.denominator
    error = value - Fraction(nearest)
    if error == 0 or math.frexp(nearest)[0] * 2**53 % 2 == 1:
        return nearest
    return math.nextafter(nearest, math.inf if error > 0 else -math.inf)
