# SPDX-License-Identifier: Apache-2.0
"""From float64 to the type of the result in one rounding, to nearest, ties to even.

The last step before a tile is written. Torch converts float64 to the narrow types by way of float32, which rounds
twice: what float32 moves onto the halfway point between two narrow numbers then goes the wrong way half of the time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvflare_lazy.aggregation.memory import Arena

# Bits of a float32 fraction that the narrow type has no room for.
_DROPPED_BITS = {
    torch.bfloat16: 16,
    torch.float16: 13,
    torch.float8_e4m3fn: 20,
    torch.float8_e4m3fnuz: 20,
    torch.float8_e5m2: 21,
    torch.float8_e5m2fnuz: 21,
}
#: Floating-point types that are rounded by way of float32.
NARROW = frozenset(_DROPPED_BITS)
#: Floating-point types that results can have.
FLOATS = NARROW | {torch.float32, torch.float64}
#: What `round_into` takes of an arena for each element, at most.
ROUNDING_BYTES = 8
#: An integer type for the bits of a type, by its bytes.
SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 512
_MOST_ROWS = 64


class Excess(Protocol):
    """Tells by how much the true values exceed numbers that they are very close to."""

    def __call__(self, rows: Rows, numbers: torch.Tensor) -> torch.Tensor:
        """Return float64 numbers of which only the sign counts.

        Args:
            rows: Which of the values.
            numbers: Float64; halfway points of the type that is rounded to, NaN where the value is near none.
        """


class Rows:
    """Some of the elements of a tile: called with any tensor of the tile's length, it returns these elements of it."""

    def __init__(self, rows: torch.Tensor | None, whole: int) -> None:
        self._rows = rows
        self._whole = whole

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these elements; a copy, or a view."""
        if self._rows is None:
            return tensor[self._whole :]
        return tensor[: self._whole].view(-1, _ROW)[self._rows]

    def set(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Set these elements."""
        if self._rows is None:
            tensor[self._whole :] = values
        else:
            tensor[: self._whole].view(-1, _ROW)[self._rows] = values

    def places(self, where: torch.Tensor) -> torch.Tensor:
        """Return the places in the tile of those of these elements for which `where` is true."""
        if self._rows is None:
            return where.nonzero().view(-1) + self._whole
        row, column = where.nonzero().unbind(1)
        return self._rows[row] * _ROW + column


def round_into(out: torch.Tensor, values: torch.Tensor, arena: Arena, excess: Excess | None = None) -> None:
    """Round float64 values to the type of `out`.

    Args:
        out: Where they go. Integers outside of its range become its least or greatest.
        values: The values; if `out` has integers, rounded in place.
        arena: Memory for what happens on the way.
        excess: If the values are themselves the nearest to the true ones: the sign of true value minus a number. With
            it, the result is what rounding the true values once would give. Not asked for float32 and float64.
    """
    if excess is None:

        def excess(rows: Rows, numbers: torch.Tensor) -> torch.Tensor:
            return rows(values) - numbers

    if out.dtype in NARROW:
        mark = arena.mark()
        nearest = arena.take(torch.float32, out.numel())
        nearest.copy_(values)
        _leave_false_ties(nearest, excess, out.dtype, arena)
        out.copy_(nearest)
        arena.give_back(mark)
    elif out.dtype in FLOATS:
        out.copy_(values)
    else:
        _round_to_integer(out, values, excess)
    if out.dtype in FLOATS and not torch.isfinite(values.sum()):
        # Which of the many NaNs comes out of an operation depends on where in a tile it stands.
        _set_nan(out, torch.isnan(values))


def _leave_false_ties(nearest: torch.Tensor, excess: Excess, dtype: torch.dtype, arena: Arena) -> None:
    """Move float32 numbers that were rounded onto a halfway point of the narrow type back to where they came from.

    Such a number, and each that the narrow type can represent, has zeros in all dropped bits but the first. Few have.
    """
    mark = arena.mark()
    mask = (1 << (_DROPPED_BITS[dtype] - 1)) - 1
    low = torch.bitwise_and(nearest.view(torch.int32), mask, out=arena.take(torch.int32, nearest.numel()))
    for rows in _rows_with_a_zero(low):
        near = rows(nearest)
        ties = (rows(low) == 0) & (near != near.to(dtype).float())
        if not ties.any():
            continue
        side = excess(rows, near.double().masked_fill_(~ties, math.nan)).nan_to_num_(nan=0.0)
        if side.any():
            beyond = torch.nextafter(near, side.sign().mul_(math.inf).float())
            rows.set(nearest, torch.where(side == 0, near, beyond))
    arena.give_back(mark)


def _rows_with_a_zero(low: torch.Tensor) -> Iterator[Rows]:
    """Find the zeros among non-negative integers fast, where most rows have none."""
    whole = low.numel() // _ROW * _ROW
    if whole:
        found = (low[:whole].view(-1, _ROW).amin(1) == 0).nonzero().view(-1)
        for some in torch.split(found, _MOST_ROWS):
            if some.numel():
                yield Rows(some, whole)
    if whole < low.numel():
        yield Rows(None, whole)


def _round_to_integer(out: torch.Tensor, values: torch.Tensor, excess: Excess) -> None:
    half = values - values.floor() == 0.5
    if half.any():
        rows = Rows(None, 0)
        side = excess(rows, values.masked_fill(~half, math.nan)).nan_to_num_(nan=0.0)
        values.copy_(torch.where(side == 0, values, torch.nextafter(values, side.sign().mul_(math.inf))))
    limits = torch.iinfo(out.dtype)
    greatest = float(limits.max)
    if greatest > limits.max:
        greatest = math.nextafter(greatest, 0.0)
    out.copy_(values.round_().clamp_(float(limits.min), greatest))


def _set_nan(out: torch.Tensor, where: torch.Tensor) -> None:
    # By its bits: torch does not fill the 8-bit types.
    as_integers = SAME_WIDTH[out.itemsize]
    nan = torch.tensor(math.nan).to(out.dtype).view(as_integers)
    out.view(as_integers).masked_fill_(where, nan)
