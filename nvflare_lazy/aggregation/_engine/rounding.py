# SPDX-License-Identifier: Apache-2.0
"""Rounding from float64 to the dtype of the result in one step, to nearest, ties to even.

The last step before a tile is written. Torch converts float64 to the narrow types by way of float32, which rounds
twice: a value that float32 moves onto the halfway point between two narrow numbers is then rounded in the wrong
direction half of the time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from nvflare_lazy.aggregation._engine.unlocked import multiply_and_round, multiply_and_round_twice

if TYPE_CHECKING:
    from nvflare_lazy.aggregation._engine.memory_plan import Arena


class _Precision(NamedTuple):
    """The distance from one to the next larger number of a dtype, and its least normal number.

    The values are from the standards: `torch.finfo` is wrong about some 8-bit types.
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
#: Bytes that `round_into` takes from an arena for each element.
ROUNDING_BYTES = 8
_EXPONENT = 0x7FF << 52
# The lower half of a float32 halfway between two bfloat16 numbers, as an integer: the least int16.
_HALFWAY = -(1 << 15)
# The sign of a bfloat16 number, the same bits.
_SIGN = _HALFWAY
# Elements of a tile that are searched together for such halves, and rounded again.
_ROW = 128
# Far beyond the range of the narrow types, and far below the maximum of float64.
_MAX_POWER = 2.0**900
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Floating-point types that torch sums fast. A sum is the fastest check that all elements are finite.
SUMMABLE = frozenset({torch.float64, torch.float32, torch.bfloat16})


def round_into(out: torch.Tensor, values: torch.Tensor, arena: Arena, *, factor: float = 1.0) -> None:
    """Round float64 values to the dtype of `out`.

    Args:
        out: The tensor to write to. Values outside the range of an integer dtype become its minimum or maximum.
        values: The values; overwritten.
        arena: Memory for intermediate values.
        factor: A factor of the values of floating-point dtypes, by which they are multiplied in float64.
    """
    if out.dtype not in FLOATS:
        _round_to_integer(out, values)
        return
    if out.dtype == torch.bfloat16:
        total = _round_to_bfloat16(out, values, arena, factor)
    elif out.dtype in NARROW:
        total = (values if factor == 1.0 else values.mul_(factor)).sum().item()
        out.copy_(to_precision(values, out.dtype, arena))
    else:
        total = multiply_and_round(out, values, factor)
    if not math.isfinite(total):
        _set_nan(out, torch.isnan(values))


def to_precision(values: torch.Tensor, dtype: torch.dtype, arena: Arena, *, extra_bits: int = 0) -> torch.Tensor:
    """Return float64 values rounded to numbers of a narrow dtype, as if it had no maximum.

    Args:
        values: The values; overwritten by the result.
        dtype: The dtype.
        arena: Memory for intermediate values.
        extra_bits: Number of additional bits of the result; with one, points halfway between two numbers of the dtype
            are included.
    """
    step, tiny = _PRECISIONS[dtype]
    far = _far(step / 2**extra_bits)
    mark = arena.mark()
    power = arena.take(torch.float64, values.numel())
    torch.bitwise_and(values.view(torch.int64), _EXPONENT, out=power.view(torch.int64))
    # An infinity would become NaN.
    power.clamp_(tiny, _MAX_POWER)
    values.add_(power, alpha=far).sub_(power, alpha=far)
    arena.release(mark)
    return values


def _far(step: float) -> float:
    """Return the number next to which a float64 between 1 and 2 has the last bit of a number with this step.

    Adding it, times the power of two of a value, therefore rounds correctly, and subtracting it again is exact.
    """
    return 1.5 * 2**52 * step


def _round_to_bfloat16(out: torch.Tensor, values: torch.Tensor, arena: Arena, factor: float) -> float:
    """Round twice, by way of float32, which is fast, and round the few again that may be wrong; return the sum.

    Only values that the first rounding moved halfway between two numbers can be wrong. Their rows are rounded again, in
    one step; if there are many, all rows.
    """
    step, tiny = _PRECISIONS[torch.bfloat16]
    total, count = 0.0, values.numel()
    whole = count // _ROW * _ROW
    for begin, end, rows in ((0, whole, whole // _ROW), (whole, count, 1)):
        if begin == end:
            continue
        mark = arena.mark()
        single = arena.take(torch.float32, end - begin)
        least = arena.take(torch.int16, rows)
        power = single[: single.numel() // 2 * 2].view(torch.float64)
        results, exact = out[begin:end], values[begin:end]
        added = multiply_and_round_twice(
            results,
            exact,
            exact.view(torch.int64),
            single,
            single.view(torch.int16),
            power,
            power.view(torch.int64),
            least,
            factor,
            halfway=_HALFWAY,
            exponent=_EXPONENT,
            tiny=tiny,
            max_power=_MAX_POWER,
            far=_far(step),
        )
        arena.release(mark)
        if added is None:
            added = _round_again(results, exact, arena)
            arena.release(mark)
        total += added
    return total


def _round_again(out: torch.Tensor, values: torch.Tensor, arena: Arena) -> float:
    """Round float64 values to bfloat16 in one step, and return the sum.

    Args:
        out: The results; its signs, which a result of zero would lose, are right already.
        values: The values; overwritten.
        arena: Memory for intermediate values.
    """
    to_precision(values, torch.bfloat16, arena)
    bits = arena.take(torch.int16, values.numel())
    bits.view(torch.bfloat16).copy_(values)
    out.view(torch.int16).bitwise_and_(_SIGN).bitwise_or_(bits)
    return float(out.sum())


def _round_to_integer(out: torch.Tensor, values: torch.Tensor) -> None:
    limits = torch.iinfo(out.dtype)
    greatest = float(limits.max)
    if greatest > limits.max:
        greatest = math.nextafter(greatest, 0.0)
    out.copy_(values.round_().clamp_(float(limits.min), greatest))


def _set_nan(out: torch.Tensor, where: torch.Tensor) -> None:
    # By bits: which of the many NaNs an operation returns depends on the position in the tile.
    bits = _SAME_WIDTH[out.itemsize]
    out.view(bits).masked_fill_(where, torch.tensor(math.nan).to(out.dtype).view(bits))
