# SPDX-License-Identifier: Apache-2.0
"""From float64 to the type of the result in one rounding, to nearest, ties to even.

The last step before a tile is written. Torch converts float64 to the narrow types by way of float32, which rounds
twice: what float32 moves onto the halfway point between two narrow numbers then goes the wrong way half of the time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from nvflare_lazy.aggregation.memory import Arena


class _Precision(NamedTuple):
    """The distance from one to the next larger number of a type, and its least normal number.

    As the standards have them: `torch.finfo` is wrong about some 8-bit types.
    """

    step: float
    tiny: float


_PRECISIONS = {
    torch.bfloat16: _Precision(2.0**-7, 2.0**-126),
    torch.float16: _Precision(2.0**-10, 2.0**-14),
    torch.float8_e4m3fn: _Precision(2.0**-3, 2.0**-6),
    torch.float8_e4m3fnuz: _Precision(2.0**-3, 2.0**-7),
    torch.float8_e5m2: _Precision(2.0**-2, 2.0**-14),
    torch.float8_e5m2fnuz: _Precision(2.0**-2, 2.0**-15),
}
#: Floating-point types of fewer bits than float32.
NARROW = frozenset(_PRECISIONS)
#: Floating-point types that results can have.
FLOATS = NARROW | {torch.float32, torch.float64}
#: What `round_into` takes of an arena for each element.
ROUNDING_BYTES = 8
_EXPONENT = 0x7FF << 52
# The lower half of a float32 that lies halfway between two numbers of bfloat16, as the upper half of an integer: the
# least there is.
_HALFWAY = -(1 << 31)
_ROW = 64
# Far beyond what a narrow type can hold, and far enough from what float64 can.
_LARGEST_POWER = 2.0**900
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SUMMABLE = frozenset({torch.float64, torch.float32, torch.bfloat16})


def round_into(out: torch.Tensor, values: torch.Tensor, arena: Arena) -> None:
    """Round float64 values to the type of `out`.

    Args:
        out: Where they go. Integers outside of its range become its least or greatest.
        values: The values; overwritten.
        arena: Memory for what happens on the way.
    """
    if out.dtype not in FLOATS:
        _round_to_integer(out, values)
        return
    if out.dtype == torch.bfloat16:
        _round_to_bfloat16(out, values, arena)
    else:
        out.copy_(to_precision(values, out.dtype, arena) if out.dtype in NARROW else values)
    # A sum is the fastest way to see that all is finite.
    if not torch.isfinite((out if out.dtype in _SUMMABLE else values).sum()):
        _set_nan(out, torch.isnan(values))


def to_precision(values: torch.Tensor, dtype: torch.dtype, arena: Arena, *, extra_bits: int = 0) -> torch.Tensor:
    """Return float64 values rounded to numbers of a narrow type, as if it had no greatest one.

    Args:
        values: The values; overwritten by the result.
        dtype: The type.
        arena: Memory for what happens on the way.
        extra_bits: How many bits more than that the numbers may have; with one, they are the points halfway between
            two of the type as well.
    """
    step, tiny = _PRECISIONS[dtype]
    # Next to one and a half times the right power of two, the last bit of a float64 is what should be the last bit of
    # the result. So adding that rounds as it should, and subtracting it changes nothing more.
    far = 1.5 * 2**52 * step / 2**extra_bits
    mark = arena.mark()
    power = arena.take(torch.float64, values.numel())
    torch.bitwise_and(values.view(torch.int64), _EXPONENT, out=power.view(torch.int64))
    # An infinity would become NaN.
    power.clamp_(tiny, _LARGEST_POWER)
    values.add_(power, alpha=far).sub_(power, alpha=far)
    arena.give_back(mark)
    return values


def _round_to_bfloat16(out: torch.Tensor, values: torch.Tensor, arena: Arena) -> None:
    """Round twice, by way of the upper half of a float32, which is fast, and mend the few that came out wrong.

    Only what the first rounding left halfway between two numbers can.
    """
    mark = arena.mark()
    single = arena.take(torch.float32, values.numel()).copy_(values)
    out.copy_(single)
    bits = single.view(torch.int32)
    lower_half = torch.bitwise_left_shift(bits, 16, out=arena.take(torch.int32, values.numel()))
    places = _halfway(lower_half)
    if places.numel():
        exact, halfway = values[places].abs(), single[places].double().abs()
        towards_zero = bits[places] >> 16
        wrong = exact != halfway
        mended = torch.where(exact > halfway, towards_zero + 1, towards_zero)[wrong]
        out.view(torch.int16)[places[wrong]] = mended.to(torch.int16)
    arena.give_back(mark)


def _halfway(lower_half: torch.Tensor) -> torch.Tensor:
    """Return the places that hold `_HALFWAY`: those rows first that have any, for comparing all takes much longer."""
    whole = lower_half.numel() // _ROW * _ROW
    table = lower_half[:whole].view(-1, _ROW)
    rows = (table.amin(1) == _HALFWAY).nonzero().view(-1)
    found = (table[rows] == _HALFWAY).nonzero()
    places = rows[found[:, 0]] * _ROW + found[:, 1]
    if whole == lower_half.numel():
        return places
    rest = (lower_half[whole:] == _HALFWAY).nonzero().view(-1) + whole
    return torch.cat((places, rest))


def _round_to_integer(out: torch.Tensor, values: torch.Tensor) -> None:
    limits = torch.iinfo(out.dtype)
    greatest = float(limits.max)
    if greatest > limits.max:
        greatest = math.nextafter(greatest, 0.0)
    out.copy_(values.round_().clamp_(float(limits.min), greatest))


def _set_nan(out: torch.Tensor, where: torch.Tensor) -> None:
    # By its bits: which of the many NaNs comes out of an operation depends on where in a tile it stands.
    bits = _SAME_WIDTH[out.itemsize]
    out.view(bits).masked_fill_(where, torch.tensor(math.nan).to(out.dtype).view(bits))
