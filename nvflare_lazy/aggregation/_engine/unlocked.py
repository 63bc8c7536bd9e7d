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


# Multiply float64 values, round them to bfloat16 by way of float32, and return the sum of the results. Rows of values
# in which a float32 is halfway between two results are rounded again, in one step, as `to_precision` does. If there are
# many, such as in a mean with equal weights, return None instead, after the multiplication. `least` has one element for
# each row. `bits`, `halves` and `power_bits` are the bits of `values`, `single` and `power`, and `power` may use the
# memory of `single`.
def _multiply_and_round_twice(
    out: Tensor,
    values: Tensor,
    bits: Tensor,
    single: Tensor,
    halves: Tensor,
    power: Tensor,
    power_bits: Tensor,
    least: Tensor,
    factor: float,
    halfway: int,
    exponent: int,
    tiny: float,
    max_power: float,
    far: float,
) -> float | None:
    if factor != 1.0:
        values.mul_(factor)
    single.copy_(values)
    out.copy_(single)
    count = least.numel()
    # Comparing all halves takes longer than finding the least one of each row.
    torch.amin(halves.view(count, -1), [1], False, out=least)
    some = (least == halfway).nonzero().view(-1)
    if some.numel() > count // 4:
        return None
    if some.numel() > 0:
        exact = values.view(count, -1).index_select(0, some)
        powers = power[: exact.numel()].view_as(exact)
        exponents = power_bits[: exact.numel()].view_as(exact)
        torch.bitwise_and(bits.view(count, -1).index_select(0, some), exponent, out=exponents)
        powers.clamp_(tiny, max_power)
        exact.add_(powers, alpha=far).sub_(powers, alpha=far)
        rows = out.view(count, -1)
        # A result of zero would lose its sign.
        rows.index_copy_(0, some, exact.to(out.dtype).copysign_(rows.index_select(0, some)))
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


# Compare real numbers `a` and `b`, in parts as long as `errors` and `ratios`. `x` and `y` have the type to compute
# with: they are the same tensors, or memory for a part, which `errors` and `ratios` may then use too: each operation is
# faster in place. The first results are: the sums of the squares of `a`, of `b` and of their differences, the maximum
# and the sum of the absolute differences, the number of those beyond the tolerance, the maximum and the sum of the
# ratios to the elements of `b` that are not zero, and the number of these elements. The list is empty if values are not
# finite, or too small or too large for the precision of the squares. The last result are the rows of `row` elements
# with a difference of at least `least`.
def _differences(
    a: Tensor,
    b: Tensor,
    x: Tensor,
    y: Tensor,
    errors: Tensor,
    ratios: Tensor,
    row: int,
    atol: float,
    rtol: float,
    least: float,
) -> tuple[list[float], Tensor]:
    squares = [0.0, 0.0, 0.0]
    max_abs, sum_abs, different, max_rel, sum_rel, not_zero = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    rows: list[Tensor] = []
    for begin in range(0, a.numel(), errors.numel()):
        p, q = a[begin : begin + errors.numel()], b[begin : begin + errors.numel()]
        count = p.numel()
        whole = count // row * row
        if a.dtype != x.dtype:
            p = x[:count].copy_(p)
        if b.dtype != y.dtype:
            q = y[:count].copy_(q)
        error, ratio = errors[:count], ratios[:count]
        greatest = 1.0
        for index, values in enumerate([p, q, error]):
            if index == 2:
                torch.sub(p, q, out=error).abs_()
                largest = error[:whole].view(-1, row).amax([1])
                if whole < count:
                    largest = torch.cat([largest, error[whole:].amax().view(1)])
                rows.append((largest >= least).nonzero().view(-1) + begin // row)
                greatest = float(largest.amax())
            if greatest != 0.0:
                norms = torch.linalg.vector_norm(values[:whole].view(-1, row), 2, [1])
                total = float(norms.mul_(norms).sum())
                if whole < count:
                    total += float(values[whole:].square().sum())
                # Between these, a sum in float32 has its digits, and its terms are finite.
                is_precise = total > 1e-20 and total < 1e30
                if index < 2 and not is_precise and float(values.abs().amax()) != 0.0:
                    return [], errors
                squares[index] += total
        if greatest == 0.0:
            not_zero += float(torch.abs(q, out=ratio).sign_().sum())
            continue
        max_abs = max(max_abs, greatest)
        sum_abs += float(error.sum())
        torch.div(error, q, out=ratio).abs_()
        total, divided = float(ratio.sum()), float(count)
        if total - total != 0.0:  # not finite
            if b.dtype != y.dtype:
                q.copy_(b[begin : begin + count])
            signs = q.abs().sign_()
            divided = float(signs.sum())
            torch.div(error, q.abs().add_(1.0 - signs), out=ratio).mul_(signs)
            total = float(ratio.sum())
            if total - total != 0.0:  # not finite
                return [], errors
        max_rel = max(max_rel, float(ratio.amax()))
        sum_rel += total
        not_zero += divided
        # The sum of zeros and ones is exact.
        if rtol != 0.0:
            if b.dtype != y.dtype:
                q.copy_(b[begin : begin + count])
            error.sub_(torch.abs(q, out=ratio).mul_(rtol).add_(atol)).sign_().clamp_min_(0.0)
        elif atol != 0.0:
            error.sub_(atol).sign_().clamp_min_(0.0)
        else:
            error.sign_()
        different += float(error.sum())
    found = [squares[0], squares[1], squares[2], max_abs, sum_abs, different, max_rel, sum_rel, not_zero]
    return found, torch.cat(rows)


add_term = _unlocked(_add_term)
multiply_and_round = _unlocked(_multiply_and_round)
multiply_and_round_twice = _unlocked(_multiply_and_round_twice)
sort = _unlocked(_sort)
differences = _unlocked(_differences)
