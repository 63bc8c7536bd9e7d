# SPDX-License-Identifier: Apache-2.0
"""Sequences of torch operations that run without the interpreter's lock from beginning to end.

The threads of a pass call these functions for their tiles. Each call of torch from Python releases the lock and
acquires it again, and a thread that has to wait for it sleeps: with two threads and the operations called one by one, a
mean in bfloat16 took a quarter longer.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

_Function = TypeVar("_Function", bound="Callable[..., Any]")


def _unlocked(function: _Function) -> _Function:
    """Return a function that TorchScript runs with the same operations.

    TorchScript is in maintenance only. Without it, or if it does not accept the source, the function is returned as
    it is: it computes the same bits, and only takes longer.
    """
    try:
        unit = torch.jit.CompilationUnit(inspect.getsource(function))
        compiled: _Function = getattr(unit, function.__name__)
    except (AttributeError, OSError, RuntimeError):
        return function
    return compiled


# Plain functions of tensors, in the part of Python that TorchScript accepts; comments say what docstrings would.
#
# Add a product to the sums; with `is_fused`, in one operation, which is exact only if the product is exact.
def _add_term(total: Tensor, term: Tensor, values: Tensor, factor: float, is_first: bool, is_fused: bool) -> None:
    if is_first:
        total.copy_(values)
        if factor != 1.0:
            total.mul_(factor)
    elif is_fused:
        term.copy_(values)
        total.add_(term, alpha=factor)
    else:
        term.copy_(values)
        term.mul_(factor)
        total.add_(term)


# Multiply float64 values, round them to the dtype of `out`, and return the sum of the results.
def _multiply_and_round(out: Tensor, values: Tensor, factor: float) -> float:
    if factor != 1.0:
        values.mul_(factor)
    out.copy_(values)
    return float(out.sum())


# Multiply float64 values, round them to bfloat16 by way of float32, and return the sum of the results. Values whose
# float32 is halfway between two results are rounded again, in one step, as `to_precision` does; if there are many, such
# as in a mean with equal weights, return None instead, after the multiplication.
# `halves` are the bits of `single`, and `least` has one element for each row of them.
def _multiply_and_round_twice(
    out: Tensor,
    single: Tensor,
    values: Tensor,
    halves: Tensor,
    least: Tensor,
    factor: float,
    halfway: int,
    tiny: float,
    max_power: float,
    far: float,
) -> float | None:
    if factor != 1.0:
        values.mul_(factor)
    single.copy_(values)
    out.copy_(single)
    # Comparing all halves takes longer than finding the least one of each row, and then of each piece of these rows.
    rows = halves.view(least.numel(), -1)
    torch.amin(rows, [1], False, out=least)
    candidates = (least == halfway).nonzero().view(-1)
    if candidates.numel() > least.numel() // 4:
        return None
    if candidates.numel() > 0:
        width = rows.size(1)
        piece = 64 if width % 64 == 0 else width
        for some in torch.split(candidates, 512):
            pieces = rows.index_select(0, some).view(-1, piece)
            short = (pieces.amin([1]) == halfway).nonzero().view(-1)
            found = (pieces.index_select(0, short).view(-1) == halfway).nonzero().view(-1)
            found = short.index_select(0, found // piece) * piece + found % piece
            places = (some.index_select(0, found // width) * width + found % width) // 2
            exact = values.index_select(0, places)
            mantissa, _ = torch.frexp(exact)
            # The power of two above each value. For zeros and infinities, any power is right.
            power = exact.div(mantissa).nan_to_num_(tiny).clamp_(tiny, max_power)
            again = exact.add(power, alpha=far).sub_(power, alpha=far).copysign_(exact)
            out.index_copy_(0, places, again.to(out.dtype))
    return float(out.sum())


# Compare and exchange tensors, element by element, in the order of `lows` and `highs`, the indices of each comparison.
# Of a comparison, the smaller values are needed if its element of `needs` is 1, the larger if it is 2, both if it is 3.
def _sort(wires: list[Tensor], spare: Tensor, lows: list[int], highs: list[int], needs: list[int]) -> list[Tensor]:
    for index in range(len(needs)):
        low = wires[lows[index]]
        high = wires[highs[index]]
        if needs[index] == 1:
            torch.minimum(low, high, out=low)
        elif needs[index] == 2:
            torch.maximum(low, high, out=high)
        else:
            torch.minimum(low, high, out=spare)
            torch.maximum(low, high, out=high)
            wires[lows[index]] = spare
            spare = low
    return wires


# Compare real numbers; `errors` receives the absolute differences of `x` and `y`, and `ratios` their ratios to `y`.
# The results are the sums of the squares of `x` and of `y`; then of the differences the maximum, the sum, and the sum
# of squares; then of the ratios the maximum and the sum. If the maximum difference is zero, the results end with it.
def _differences(x: Tensor, y: Tensor, errors: Tensor, ratios: Tensor) -> list[float]:
    # Torch sums in a tree; `torch.dot` lost three digits of equal values.
    found = [float(torch.mul(values, values, out=ratios).sum()) for values in [x, y]]
    torch.sub(x, y, out=errors).abs_()
    found.append(float(errors.amax()))
    if found[2] != 0.0:
        found.append(float(errors.sum()))
        found.append(float(torch.mul(errors, errors, out=ratios).sum()))
        torch.abs(y, out=ratios)
        torch.div(errors, ratios, out=ratios)
        found.append(float(ratios.amax()))
        found.append(float(ratios.sum()))
    return found


add_term = _unlocked(_add_term)
multiply_and_round = _unlocked(_multiply_and_round)
multiply_and_round_twice = _unlocked(_multiply_and_round_twice)
sort = _unlocked(_sort)
differences = _unlocked(_differences)
