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


# Multiply float64 values, round them to bfloat16 by way of float32, correct the wrong results, and return their sum.
# `halves` are the bits of `single`, and `least` has one element for each row of them.
def _multiply_and_round_twice(
    out: Tensor,
    out_bits: Tensor,
    single: Tensor,
    values: Tensor,
    halves: Tensor,
    least: Tensor,
    factor: float,
    halfway: int,
    lower: int,
) -> float:
    if factor != 1.0:
        values.mul_(factor)
    single.copy_(values)
    out.copy_(single)
    # Comparing all halves is slower than comparing those of the rows whose least half is the one that is searched.
    count = halves.numel() // least.numel()
    rows = halves.view(-1, count)
    torch.amin(rows, [1], False, out=least)
    candidates = (least == halfway).nonzero().view(-1)
    if candidates.numel() > 0:
        found = (rows.index_select(0, candidates).view(-1) == halfway).nonzero().view(-1)
        places = candidates.index_select(0, found // count) * count + found % count
        places = places.masked_select(places % 2 == lower) // 2
        exact = values.index_select(0, places)
        rounded = single.index_select(0, places)
        wrong = exact != rounded
        if bool(wrong.any()):
            towards_zero = halves.index_select(0, 2 * places + (1 - lower))
            mended = towards_zero + (exact.abs() > rounded.abs()).to(torch.int16)
            out_bits.index_copy_(0, places.masked_select(wrong), mended.masked_select(wrong))
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


add_term = _unlocked(_add_term)
multiply_and_round = _unlocked(_multiply_and_round)
multiply_and_round_twice = _unlocked(_multiply_and_round_twice)
sort = _unlocked(_sort)
