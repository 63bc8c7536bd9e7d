# SPDX-License-Identifier: Apache-2.0
"""The weighted mean of one tile: summed in float64, in a fixed order, rounded once.

What almost every rule ends in. Results in 8 and 16 bits, and integers, are held to more: they are the exact mean,
correctly rounded, in every element. Mostly the processor's inexact flag shows that the plain sum was exact. Where it
was not, the tile is summed again in twice the precision, and what even that cannot decide is computed in fractions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch

from nvflare_lazy.aggregation.inexact_flag import inexact_flag
from nvflare_lazy.aggregation.memory import Arena
from nvflare_lazy.aggregation.rounding import FLOATS, NARROW, ROUNDING_BYTES, SAME_WIDTH, round_into

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nvflare_lazy.aggregation.rounding import Rows

#: What a mean takes of an arena for each element, beside the values.
MEAN_BYTES = 6 * 8 + ROUNDING_BYTES
# With a float32 or a narrower integer, the product of a whole weight below this is exact.
_EXACT_PRODUCTS = 1 << 29
_AT_MOST_24_BITS = NARROW | {torch.float32, torch.int8, torch.uint8, torch.int16, torch.uint16}
_LARGEST_EXACT_INTEGER = 2.0**52
_FRACTIONS_AT_ONCE = 4096
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Weights:
    """The weights of a mean, in the form that rounds least.

    Only their ratios count. So where they are multiples of one number, as numbers of examples and equal weights are,
    they become the smallest whole numbers of these ratios, with which sums stay exact.

    Attributes:
        factors: What each value is multiplied by.
        total: What the sum is divided by.
        whole: Whether these are small whole numbers.
        exact_total: The total without its rounding.
    """

    factors: tuple[float, ...]
    total: float
    whole: bool
    exact_total: Fraction

    @classmethod
    def of(cls, weights: Sequence[float], *, of_zero: float = 0.0) -> Weights:
        """Return the weights in this form.

        Args:
            weights: Finite, not negative and not all zero.
            of_zero: A further weight, of a value that is zero everywhere.
        """
        exact = [Fraction(weight) for weight in (*weights, of_zero)]
        scale = math.lcm(*(weight.denominator for weight in exact))
        counts = [int(weight * scale) for weight in exact]
        divisor = math.gcd(*counts)
        if sum(counts) // divisor < _EXACT_PRODUCTS:
            exact = [Fraction(count // divisor) for count in counts]
            whole = True
        else:
            whole = False
        total = sum(exact, start=Fraction(0))
        return cls(tuple(map(float, exact[:-1])), float(total), whole, total)


def mean_into(out: torch.Tensor, read: Callable[[int], torch.Tensor], weights: Weights, arena: Arena) -> None:
    """Write the weighted mean of some values.

    Args:
        out: Where it goes.
        read: Gives the values of one of them by index; may be asked more than once, the last answer counts.
        weights: Their weights; who has none is not read.
        arena: Memory for what happens on the way.
    """
    mark = arena.mark()
    mean = _Mean(out, read, weights, arena)
    is_exact = mean.add_up()
    if out.dtype in FLOATS and out.dtype not in NARROW:
        round_into(out, mean.quotient(), arena)
    else:
        if not is_exact:
            mean.add_up_twice_as_precise()
        mean.finish()
    arena.give_back(mark)


def sum_into(out: torch.Tensor, read: Callable[[int], torch.Tensor], weights: Weights, arena: Arena) -> None:
    """Write the weighted mean in float64, for those who go on computing with it."""
    mark = arena.mark()
    mean = _Mean(out, read, weights, arena)
    mean.add_up()
    out.copy_(mean.quotient())
    arena.give_back(mark)


class _Mean:
    """Sums of weighted values: `_sum`, and once that had to be rounded, what is missing in it, to within `_doubt`."""

    def __init__(self, out: torch.Tensor, read: Callable[[int], torch.Tensor], weights: Weights, arena: Arena) -> None:
        self._out = out
        self._read = read
        self._weights = weights
        self._arena = arena
        self._terms = [(index, factor) for index, factor in enumerate(weights.factors) if factor]
        self._sum, self._term = (arena.take(torch.float64, out.numel()) for _ in range(2))
        self._missing: torch.Tensor | None = None
        self._doubt: torch.Tensor | None = None
        self._undecided: list[torch.Tensor] = []

    def add_up(self) -> bool:
        """Sum the terms; return whether the sums are known to be exact."""
        # With more threads than this one, the flag would see a part of the work.
        flag = inexact_flag() if torch.get_num_threads() == 1 else None
        exact = flag is not None and self._weights.whole
        for number, (index, factor) in enumerate(self._terms):
            values = self._read(index)
            if flag is not None:
                flag.clear()
            if number == 0:
                self._sum.copy_(values)
                if factor != 1.0:
                    self._sum.mul_(factor)
            else:
                self._term.copy_(values)
                # Whether multiply-and-add rounds once or twice depends on where in a tile an element stands. So it
                # is left to cases in which the product is exact.
                if factor == 1.0 or (self._weights.whole and values.dtype in _AT_MOST_24_BITS):
                    self._sum.add_(self._term, alpha=factor)
                else:
                    self._sum.add_(self._term.mul_(factor))
            exact = exact and flag is not None and not flag.is_up()
        return exact

    def add_up_twice_as_precise(self) -> None:
        """Sum the terms once more, with all that the sums round away (Knuth's TwoSum)."""
        arena, count = self._arena, self._out.numel()
        missing, doubt, total, error = (arena.take(torch.float64, count).zero_() for _ in range(4))
        self._sum.zero_()
        for index, factor in self._terms:
            values = self._read(index)
            for part in (factor,) if self._weights.whole else _halves(factor):
                term = self._term.copy_(values).mul_(part)
                if values.dtype not in _AT_MOST_24_BITS:
                    doubt.add_(torch.abs(term, out=error), alpha=2.0**-52)
                torch.add(self._sum, term, out=total)
                torch.sub(total, self._sum, out=error)
                term.sub_(error)
                torch.sub(total, error, out=error)
                torch.sub(self._sum, error, out=error).add_(term)
                missing.add_(error)
                # What is missing is itself summed with rounding.
                doubt.add_(error.abs_(), alpha=4 * len(self._terms) * 2.0**-53)
                self._sum, total = total, self._sum
        for inexact in (missing, doubt):
            inexact.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        torch.add(self._sum, missing, out=total)
        missing.sub_(torch.sub(total, self._sum, out=error))
        self._sum = total
        self._missing, self._doubt = missing, doubt
        # Where almost everything cancelled out, even this is not enough.
        self._undecided = [(doubt > self._sum.abs().mul_(2.0**-30)).nonzero().view(-1)]

    def quotient(self) -> torch.Tensor:
        """Return the means in float64; valid until the next step."""
        mantissa, _ = math.frexp(self._weights.total)
        if mantissa == 0.5:
            # A power of two: the same quotient, in a third of the time.
            return torch.mul(self._sum, 1.0 / self._weights.total, out=self._term)
        return torch.div(self._sum, self._weights.total, out=self._term)

    def finish(self) -> None:
        """Write the exact means, rounded once."""
        if self._out.dtype not in FLOATS:
            self._undecided.append((self._sum.abs() >= _LARGEST_EXACT_INTEGER).nonzero().view(-1))
        round_into(self._out, self.quotient(), self._arena, self._excess)
        for places in self._undecided:
            for some in torch.split(places, _FRACTIONS_AT_ONCE):
                if some.numel():
                    self._finish_as_fractions(some)

    def _excess(self, rows: Rows, numbers: torch.Tensor) -> torch.Tensor:
        """Return sums minus numbers times the total, which has the sign of mean minus number."""
        # The numbers have so few bits that the first product is exact, and are so close to the means that the first
        # difference is.
        high, low = _halves(self._weights.exact_total)
        excess = rows(self._sum) - numbers * high
        if low:
            excess.sub_(numbers * low)
        if self._missing is not None and self._doubt is not None:
            excess.add_(rows(self._missing))
            doubt = rows(self._doubt)
            if not self._weights.whole:
                precision = 2.0**-78 if self._out.dtype in FLOATS else 2.0**-50
                doubt = doubt + rows(self._sum).abs().mul_(precision)
            undecided = (excess.abs() <= doubt) & (doubt > 0)
            if undecided.any():
                self._undecided.append(rows.places(undecided))
        return excess

    def _finish_as_fractions(self, places: torch.Tensor) -> None:
        sums = [Fraction(0)] * places.numel()
        for index, factor in self._terms:
            for place, value in enumerate(_exactly(self._read(index), places)):
                sums[place] += Fraction(factor) * Fraction(value)
        means = [value / self._weights.exact_total for value in sums]
        if self._out.dtype in FLOATS:
            rounded = torch.empty(len(means), dtype=self._out.dtype)
            odd = torch.tensor([_round_to_odd(mean) for mean in means], dtype=torch.float64)
            round_into(rounded, odd, Arena(_FRACTIONS_AT_ONCE * ROUNDING_BYTES + 256))
            bits = rounded.view(SAME_WIDTH[rounded.itemsize])
        else:
            half = 1 << (8 * self._out.itemsize - 1)
            wrapped = [(round(mean) + half) % (2 * half) - half for mean in means]
            bits = torch.tensor(wrapped, dtype=_SIGNED[self._out.itemsize])
        self._out.view(bits.dtype)[places] = bits


def _halves(number: Fraction | float) -> tuple[float, float]:
    """Return two numbers whose sum this is, the first with so few bits that a narrow one times it is exact."""
    exact = Fraction(number)
    mantissa, exponent = math.frexp(float(exact))
    high = math.ldexp(round(mantissa * _EXACT_PRODUCTS), exponent) / _EXACT_PRODUCTS
    return high, float(exact - Fraction(high))


def _exactly(values: torch.Tensor, places: torch.Tensor) -> list[Any]:
    """Return some elements as Python numbers."""
    if values.dtype in FLOATS:
        return list(values.double()[places].tolist())
    signed = values.view(_SIGNED[values.itemsize])[places].tolist()
    if torch.iinfo(values.dtype).min < 0:
        return list(signed)
    return [value % (1 << (8 * values.itemsize)) for value in signed]


def _round_to_odd(value: Fraction) -> float:
    """Return a number next to `value` that rounds to every narrower type as `value` itself would."""
    nearest = value.numerator / value.denominator
    error = value - Fraction(nearest)
    if error == 0 or math.frexp(nearest)[0] * 2**53 % 2 == 1:
        return nearest
    return math.nextafter(nearest, math.inf if error > 0 else -math.inf)
