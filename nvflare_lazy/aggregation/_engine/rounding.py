# SPDX-License-Identifier: Apache-2.0
"""From float64 to the type of the result in one rounding, to nearest, ties to even.

The last step before a tile is written. Torch converts float64 to the narrow types by way of float32, which rounds
twice: what float32 moves onto the halfway point between two narrow numbers then goes the wrong way half of the time.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from nvflare_lazy.aggregation._engine.memory_plan import Arena


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
# The lower half of a float32 that lies halfway between two numbers of bfloat16, as an integer: the least there is.
_HALFWAY = -(1 << 15)
_LOWER_HALF = 0 if sys.byteorder == "little" else 1
# Elements of a tile in which such halves are looked for together.
_ROW = 256
# Far beyond what a narrow type can hold, and far enough from what float64 can.
_MAX_POWER = 2.0**900
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Floating-point types that torch sums fast. A sum is the fastest way to see that all elements are finite.
SUMMABLE = frozenset({torch.float64, torch.float32, torch.bfloat16})


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
    if not math.isfinite((out if out.dtype in SUMMABLE else values).sum().item()):
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
    power.clamp_(tiny, _MAX_POWER)
    values.add_(power, alpha=far).sub_(power, alpha=far)
    arena.release(mark)
    return values


def _round_to_bfloat16(out: torch.Tensor, values: torch.Tensor, arena: Arena) -> None:
    """Round twice, by way of float32, which is fast, and mend the few that came out wrong.

    Only what the first rounding left halfway between two numbers can. They are so few that NumPy is the better tool:
    each call of torch lets other threads have the interpreter, and getting it back takes longer than these.
    """
    mark = arena.mark()
    halves = arena.take(torch.int16, 2 * values.numel())
    arena.release(mark)
    single = arena.take(torch.float32, values.numel())  # in the same memory
    out.copy_(single.copy_(values))
    places = _halfway(halves)
    if len(places):
        rounded = single.numpy()
        exact, halfway = values.numpy()[places], rounded[places].astype(np.float64)
        wrong = exact != halfway
        towards_zero = (rounded.view(np.int32)[places] >> 16).astype(np.int16)
        mended = towards_zero + (np.abs(exact) > np.abs(halfway))
        out.view(torch.int16).numpy()[places[wrong]] = mended[wrong]
    arena.release(mark)


def _halfway(halves: torch.Tensor) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the places whose lower half is `_HALFWAY`: rows that have any first, for comparing all takes longer."""
    whole = halves.numel() // (2 * _ROW) * (2 * _ROW)
    rows = (halves[:whole] if whole < halves.numel() else halves).view(-1, 2 * _ROW)
    # Upper halves are in these as well. One of the same bits, of minus zero for one, costs a look and nothing else.
    candidates = np.flatnonzero(rows.amin(1).numpy() == _HALFWAY)
    row, column = np.divmod(np.flatnonzero(rows.numpy()[candidates][:, _LOWER_HALF::2] == _HALFWAY), _ROW)
    found = candidates[row] * _ROW + column
    if whole == halves.numel():
        return found
    rest = np.flatnonzero(halves[whole:].numpy()[_LOWER_HALF::2] == _HALFWAY) + whole // 2
    return np.concatenate((found, rest))


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
