# SPDX-License-Identifier: Apache-2.0
"""The weighted mean of one tile: summed in float64, in a fixed order, rounded once.

Almost every rule ends in it. Results in 8 and 16 bits, and integers, are more precise: every element is the exact mean,
correctly rounded. Usually the processor's inexact flag shows that the plain sum was exact. If it was not, the few
elements next to a halfway point are summed again, exactly.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch

from nvflare_lazy.aggregation._engine._exact_sum import (
    ExactSum,
    as_python,
    from_python,
    inexact_flag,
    pick,
    put,
    round_to_odd,
    significant_bits,
)
from nvflare_lazy.aggregation._engine.rounding import FLOATS, ROUNDING_BYTES, round_into, to_precision
from nvflare_lazy.aggregation._engine.unlocked import add_term

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nvflare_lazy.aggregation._engine.memory_plan import Arena

#: Bytes that a mean takes from an arena for each element, in addition to the values: the sum, then one temporary.
MEAN_BYTES = 8 + max(8, ROUNDING_BYTES)
# The exact way needs three numbers per element instead of one, so it processes a tile in three parts.
_PARTS = 3
_MAX_TOTAL = 1 << 38
_MAX_EXACT_INTEGER = 2.0**51
_MAX_AT_ONCE = 1 << 14


@dataclass(slots=True)
class Weights:
    """The weights of a mean, in the form with the smallest rounding errors.

    Only their ratios count. If they are multiples of one number, as numbers of examples and equal weights are, they
    become the smallest integers with these ratios, so that sums stay exact. Otherwise a power of two scales them to a
    sum close to 1, so that no weight is too large or too small to compute with.

    Attributes:
        factors: The factor of each value.
        total: The divisor of the sum.
        whole: Whether factors and total are small integers.
        exact_total: The total without rounding.
        terms: Indices and factors of the values whose weight is not zero.
        is_power_of_two: Whether division by the total is exact.
        reciprocal: The factor that replaces division by the total, if it gives the same halfway points, else None.
    """

    factors: tuple[float, ...]
    total: float
    whole: bool
    exact_total: Fraction
    terms: list[tuple[int, float]] = field(init=False)
    is_power_of_two: bool = field(init=False)
    reciprocal: float | None = field(init=False)
    # Threads share the weights of a round. `cached_property` would have Python 3.11 make a `__dict__` when two of them
    # first read an attribute, and make it twice, with the same memory, if the garbage collector runs at that moment.
    _other_forms: dict[str, Weights] = field(init=False, default_factory=dict)
    _fused: dict[torch.dtype, list[bool]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.terms = [(index, factor) for index, factor in enumerate(self.factors) if factor]
        self.is_power_of_two = math.frexp(self.total)[0] == 0.5
        multiplies = self.is_power_of_two or _divides_by_multiplying(self.total)
        self.reciprocal = 1.0 / self.total if multiplies else None

    @classmethod
    def of(cls, weights: Sequence[float], *, of_zero: float = 0.0) -> Weights:
        """Return the weights in this form.

        Args:
            weights: Finite, not negative and not all zero.
            of_zero: The weight of an additional value that is zero everywhere.
        """
        exact = [Fraction(weight) for weight in (*weights, of_zero)]
        scale = math.lcm(*(weight.denominator for weight in exact))
        counts = [int(weight * scale) for weight in exact]
        divisor = math.gcd(*counts)
        whole = sum(counts) // divisor < _MAX_TOTAL
        if whole:
            exact = [Fraction(count // divisor) for count in counts]
        else:
            total = sum(exact, start=Fraction(0))
            power = total.denominator.bit_length() - total.numerator.bit_length()
            # A weight that is too small compared with the others stays positive, so that its contribution is read and
            # checked.
            scaled = [max(float(weight * Fraction(2) ** power), math.ulp(0.0)) if weight else 0.0 for weight in exact]
            exact = [*map(Fraction, scaled)]
        total = sum(exact, start=Fraction(0))
        return cls(tuple(map(float, exact[:-1])), float(total), whole, total)

    @property
    def guarded(self) -> Weights:
        """The same ratios, for sums whose quotients must not be mistaken for halfway points.

        All weights are multiples of a guard of four bits. An exact sum therefore never needs the last bits of float64,
        and without these bits its quotient cannot be so close to a halfway point that float64 rounds it to one. The
        guard is chosen so that quotients that are halfway points are also correct by multiplication.
        """
        return self._form("guarded", lambda: self._times(range(9, 64, 2)))

    @property
    def quick(self) -> Weights:
        """The same ratios, with a total by which division takes a third of the time, if there is one."""
        return self._form("quick", lambda: self._times(range(1, 64, 2)))

    @property
    def below_one(self) -> Weights:
        """The same ratios with a total of less than 1/4, so that no sum of finite values is infinite."""
        return self._form("below one", lambda: self._scaled(2.0 ** -(math.frexp(self.total)[1] + 2)))

    def _form(self, name: str, make: Callable[[], Weights]) -> Weights:
        form = self._other_forms.get(name)
        if form is None:
            form = self._other_forms[name] = make()
        return form

    def _scaled(self, scale: float) -> Weights:
        factors = tuple(scale * factor for factor in self.factors)
        return Weights(factors, scale * self.total, whole=False, exact_total=Fraction(scale) * self.exact_total)

    def _times(self, guards: range) -> Weights:
        """Return multiples of the weights for which multiplying by the reciprocal is correct, if there are any."""
        if not self.whole or self.is_power_of_two:
            return self
        guard = next((guard for guard in guards if _divides_by_multiplying(guard * self.total)), guards[0])
        return Weights(
            tuple(guard * factor for factor in self.factors), guard * self.total, True, guard * self.exact_total
        )

    def fused(self, dtype: torch.dtype) -> list[bool]:
        """Return for each term whether its products with values of a dtype are exact."""
        known = self._fused.get(dtype)
        if known is None:
            bits = significant_bits(dtype)
            known = [
                factor == 1.0 or (self.whole and bits + int(factor).bit_length() <= 53) for _, factor in self.terms
            ]
            self._fused[dtype] = known
        return known


def _divides_by_multiplying(total: float) -> bool:
    """Return whether a short number times the total, times its reciprocal, gives that number despite rounding."""
    return abs(Fraction(1.0 / total) * Fraction(total) - 1) < Fraction(1, 1 << 54)


def mean_into(out: torch.Tensor, read: Callable[[int], torch.Tensor], weights: Weights, arena: Arena) -> None:
    """Write the weighted mean of some values.

    Args:
        out: The tensor to write to.
        read: Returns the values at an index; it may run repeatedly for an index, and the last result counts.
        weights: The weights; values with weight zero are not read.
        arena: Memory for intermediate values.
    """
    mark = arena.mark()
    if out.dtype == torch.float64:
        sum_into(out, read, weights, arena)
        round_into(out, out, arena)
    elif out.dtype == torch.float32:
        mean = _Mean(out, read, weights.quick, arena)
        mean.add_up()
        mean.round()
    else:
        mean = _Mean(out, read, weights.guarded, arena)
        if mean.add_up(track_rounding=True):
            mean.round()
        else:
            mean.finish_exact()
    arena.release(mark)


def sum_into(out: torch.Tensor, read: Callable[[int], torch.Tensor], weights: Weights, arena: Arena) -> None:
    """Write the weighted mean in float64, for further computation."""
    mark = arena.mark()
    mean = _Mean(out, read, weights, arena)
    mean.add_up()
    out.copy_(mean.divide())
    arena.release(mark)
    if not math.isfinite(out.sum().item()):
        _mend_overflows(out, read, weights, arena)
        arena.release(mark)


def _mend_overflows(out: torch.Tensor, read: Callable[[int], torch.Tensor], weights: Weights, arena: Arena) -> None:
    """Replace means of finite values whose sum was too large for float64."""
    mean = _Mean(out, read, weights.below_one, arena)
    mean.add_up()
    is_overflow = torch.isfinite(mean.sum).logical_and_(~torch.isfinite(out))
    largest = torch.finfo(torch.float64).max
    torch.where(is_overflow, mean.divide().clamp_(-largest, largest), out, out=out)


class _Mean:
    def __init__(self, out: torch.Tensor, read: Callable[[int], torch.Tensor], weights: Weights, arena: Arena) -> None:
        self._out = out
        self._read = read
        self._weights = weights
        self._arena = arena
        self.sum = arena.take(torch.float64, out.numel())

    @contextmanager
    def _spare(self, count: int) -> Iterator[torch.Tensor]:
        """Lend memory for some numbers."""
        mark = self._arena.mark()
        yield self._arena.take(torch.float64, count)
        self._arena.release(mark)

    def add_up(self, *, track_rounding: bool = False) -> bool:
        """Sum the terms.

        Returns:
            With `track_rounding`, whether the sums are known to be exact and, for integer results, below 2^51.
        """
        flag = inexact_flag() if track_rounding and self._weights.whole else None
        exact = flag is not None
        total, weights = self.sum, self._weights
        mark = self._arena.mark()
        term = self._arena.take(torch.float64, total.numel())
        dtype, fused = None, [False]
        for number, (index, factor) in enumerate(weights.terms):
            values = self._read(index)
            if values.dtype is not dtype:
                dtype, fused = values.dtype, weights.fused(values.dtype)
            if flag is not None:
                flag.clear()
            # Whether multiply-and-add rounds once or twice depends on the position of an element in a tile, so it is
            # used only if the product is exact.
            add_term(total, term, values, factor, number == 0, fused[number])
            exact = exact and flag is not None and not flag.is_up()
        if not weights.terms:
            total.zero_()
        if exact and self._out.dtype not in FLOATS and total.numel():
            exact = bool(torch.abs(total, out=term).amax() < _MAX_EXACT_INTEGER)
        self._arena.release(mark)
        return exact

    def divide(self) -> torch.Tensor:
        """Return the means in float64, in place of the sums."""
        weights = self._weights
        if weights.is_power_of_two:
            return self.sum if weights.total == 1.0 else self.sum.mul_(1.0 / weights.total)
        return self.sum.div_(weights.total)

    def round(self) -> None:
        """Write the means, rounded to a shorter dtype."""
        if self._out.dtype in FLOATS and self._weights.reciprocal is not None:
            round_into(self._out, self.sum, self._arena, factor=self._weights.reciprocal)
        else:
            round_into(self._out, self.divide(), self._arena)

    def finish_exact(self) -> None:
        """Write the means of sums that may have been rounded; sums for which this matters are computed again."""
        means = self.divide()
        integers = []
        for places in torch.split(self._ambiguous(means), _MAX_AT_ONCE):
            if places.numel():
                integers += self._sum_again(means, places)
        round_into(self._out, means, self._arena)
        for places, values in integers:
            put(self._out, places, values)

    def _ambiguous(self, means: torch.Tensor) -> torch.Tensor:
        """Return the positions of the means that may round to a different number than the exact means."""
        error = (2 * len(self._weights.terms) + 16) * 2.0**-53 * self._largest_possible()
        find = self._ambiguous_floats if self._out.dtype in FLOATS else self._ambiguous_integers
        found, begin = [torch.empty(0, dtype=torch.int64)], 0
        for part in torch.split(means, max(1, -(-means.numel() // _PARTS))):
            found += [places + begin for places in find(part, error)]
            begin += part.numel()
        return torch.cat(found)

    def _ambiguous_integers(self, means: torch.Tensor, error: float) -> Iterator[torch.Tensor]:
        near_half = (means - means.floor()).sub_(0.5).abs_() <= error
        too_large = means.abs() >= _MAX_EXACT_INTEGER / self._weights.total
        yield (near_half | too_large).nonzero().view(-1)

    def _ambiguous_floats(self, means: torch.Tensor, error: float) -> Iterator[torch.Tensor]:
        with self._spare(means.numel()) as nearest, self._spare(means.numel()) as distance:
            self._nearest_halfway(nearest.copy_(means))
            torch.sub(means, nearest, out=distance).abs_()
            if not torch.isfinite(distance.sum()):
                distance.nan_to_num_(nan=math.inf)
            # NumPy compares and searches several times as fast as torch.
            places = torch.from_numpy(np.flatnonzero(distance.numpy() <= error))
            near = nearest[places]
            is_halfway = near.to(self._out.dtype).double() != near
            is_small = means[places].abs() < error * 2**12
            yield places[is_halfway | is_small]

    def _nearest_halfway(self, means: torch.Tensor) -> torch.Tensor:
        """Round means to the nearest number of the dtype or the nearest point halfway between two, in place."""
        if self._out.dtype not in FLOATS:
            return means.floor_().add_(0.5)
        return to_precision(means, self._out.dtype, self._arena, extra_bits=1)

    def _largest_possible(self) -> float:
        """Return an upper bound of all means, including those of the first terms only."""
        largest = 0.0
        with self._spare(self.sum.numel()) as term:
            for index, factor in self._weights.terms:
                values = term.copy_(self._read(index))
                least, most = torch.aminmax(values) if values.numel() else (values.sum(), values.sum())
                if not (torch.isfinite(least) and torch.isfinite(most)):
                    least, most = torch.aminmax(values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))
                largest += factor * max(-least.item(), most.item())
        return largest / self._weights.total

    def _sum_again(self, means: torch.Tensor, places: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Replace some means by values that round correctly; return integers that float64 cannot represent."""
        sums = ExactSum(places.numel())
        for index, factor in self._weights.terms:
            sums.add(pick(self._read(index), places), Fraction(factor))
        sums.finish()
        quotient = sums.high / self._weights.total
        nearest = self._nearest_halfway(quotient.clone())
        excess, undecided = sums.minus(nearest, self._weights.exact_total)
        beyond = torch.nextafter(nearest, excess.sign().mul_(math.inf))
        better = torch.where(excess == 0, nearest, beyond)
        means[places] = torch.where(torch.isfinite(sums.high), better, quotient)
        # If almost everything cancelled out, even twice the precision is not enough.
        undecided |= sums.doubt > sums.high.abs() * 2.0**-30
        if self._out.dtype not in FLOATS:
            undecided |= sums.high.abs() >= _MAX_EXACT_INTEGER
        return self._finish_as_fractions(means, places[undecided]) if undecided.any() else []

    def _finish_as_fractions(
        self, means: torch.Tensor, places: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        sums = [Fraction(0)] * places.numel()
        for index, factor in self._weights.terms:
            for place, value in enumerate(as_python(pick(self._read(index), places))):
                sums[place] += Fraction(factor) * Fraction(value)
        exact = [value / self._weights.exact_total for value in sums]
        if self._out.dtype not in FLOATS:
            return [(places, from_python([round(mean) for mean in exact], self._out.dtype))]
        means[places] = torch.tensor([round_to_odd(mean) for mean in exact], dtype=torch.float64)
        return []
