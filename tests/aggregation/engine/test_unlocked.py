# SPDX-License-Identifier: Apache-2.0
"""The sequences that run without the interpreter's lock compute the bits of the same operations, one by one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from nvflare_lazy.aggregation._engine import unlocked
from nvflare_lazy.aggregation._engine.memory_plan import Arena
from nvflare_lazy.aggregation._engine.rounding import round_into

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = ("add_term", "differences", "multiply_and_round", "multiply_and_round_twice", "sort")


@pytest.mark.parametrize("name", NAMES)
def test_they_are_compiled(name: str) -> None:
    """With this version of torch; others run the functions as they are."""
    assert isinstance(getattr(unlocked, name), torch.jit.ScriptFunction)


def test_source_that_is_not_accepted_runs_as_it_is() -> None:
    def generator(values: torch.Tensor) -> object:
        yield values

    assert unlocked._unlocked(generator) is generator


@pytest.mark.parametrize(("is_first", "is_fused"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_terms(is_first: bool, is_fused: bool, dtype: torch.dtype) -> None:
    values = (torch.randn(1003, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    sums = []
    for add in (unlocked.add_term, unlocked._add_term):
        total = torch.linspace(-1, 1, 1003, dtype=torch.float64)
        add(total, torch.empty_like(total), values, 1 / 3, is_first=is_first, is_fused=is_fused)
        sums.append(total)
    assert torch.equal(*sums)


@pytest.mark.parametrize("sort", [unlocked.sort, unlocked._sort])
@pytest.mark.parametrize("needs", [1, 2, 3])
def test_comparisons(sort: Callable[..., list[torch.Tensor]], needs: int) -> None:
    """Of each comparison, the needed values; both tensors keep their places in the list."""
    values = torch.randn(2, 1003, generator=torch.Generator().manual_seed(3))
    low, high = sort([*values.clone()], torch.empty(1003), [0], [1], [needs])
    if needs & 1:
        assert torch.equal(low, values.amin(0))
    if needs & 2:
        assert torch.equal(high, values.amax(0))


@pytest.mark.parametrize("differences", [unlocked.differences, unlocked._differences])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("atol", "rtol"), [(0.0, 0.0), (0.5, 0.0), (0.25, 0.125)])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_differences(
    differences: Callable[..., tuple[list[float], torch.Tensor]],
    dtype: torch.dtype,
    atol: float,
    rtol: float,
    has_zeros: bool,
) -> None:
    """In several parts, with a last row that is shorter, and the same in the first one of both."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    a, b = torch.randn(2, 1003, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(dtype)
    if has_zeros:
        b[::5] = 0
        a[::10] = 0
    a[256:512] = b[256:512]  # a part
    x, y, errors, ratios = (torch.empty(256, dtype=wide) for _ in range(4))
    x, y = (a, b) if dtype is wide else (x, y)
    found, rows = differences(a, b, x, y, errors, ratios, 128, atol, rtol, 4.0)
    p, q = a.double(), b.double()
    error, divided = (p - q).abs(), q != 0
    ratio = error[divided] / q[divided].abs()
    expected = [p.square().sum(), q.square().sum(), error.square().sum(), error.max(), error.sum()]
    expected += [(error > atol + rtol * q.abs()).sum(), ratio.max(), ratio.sum(), divided.sum()]
    assert found == pytest.approx([*map(float, expected)], rel=1e-5)
    assert rows.tolist() == [row for row in range(8) if (error[128 * row : 128 * (row + 1)] >= 4.0).any()]
    same, _ = differences(a, a, x, a if dtype is wide else y, errors, ratios, 128, atol, rtol, math.inf)
    assert same[2:] == [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, float((a != 0).sum())]


@pytest.mark.parametrize("differences", [unlocked.differences, unlocked._differences])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, 1e-30])
@pytest.mark.parametrize("in_a", [True, False])
def test_differences_out_of_range(
    differences: Callable[..., tuple[list[float], torch.Tensor]], value: float, in_a: bool
) -> None:
    """Nothing is returned if squares do not have their digits."""
    a, b = torch.ones(300), torch.full((300,), 2.0)
    (a if in_a else b)[256:] = value
    found, _ = differences(a, b, a, b, torch.empty(256), torch.empty(256), 128, 0.0, 0.0, math.inf)
    assert found == []


@pytest.mark.parametrize("count", [1, 127, 128, 129, 5000])
@pytest.mark.parametrize("step", [4, 2000])
@pytest.mark.parametrize("compiled", [True, False])
def test_bfloat16_rounds_once(count: int, step: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to many and few points halfway between two numbers, at both ends of rows, with a factor."""
    if not compiled:
        function = unlocked._multiply_and_round_twice
        monkeypatch.setattr("nvflare_lazy.aggregation._engine.rounding.multiply_and_round_twice", function)
    generator = torch.Generator().manual_seed(2)
    near = torch.randn(count, dtype=torch.float64, generator=generator)
    for offset, error in ((0, 0.0), (1, 2.0**-40), (2, -(2.0**-40)), (127, 2.0**-40), (3, 2.0**-9)):
        number = near[offset::step].bfloat16().double()
        # Half of the distance to the next number.
        half = torch.ldexp(number.sign(), torch.frexp(number).exponent - 9)
        near[offset::step] = (number + half) * (1 + error)
    # A negative value that becomes zero, next to one that is rounded again.
    near[4::step] = -(2.0**-200)
    out = torch.empty(count, dtype=torch.bfloat16)
    round_into(out, near * 4, Arena(16 * count + 4096), factor=0.25)
    assert torch.equal(out.double(), torch.where(near.abs() > 2.0**-150, round_by_bits(near), -0.0))
    assert torch.equal(out.signbit(), near.signbit())


def round_by_bits(values: torch.Tensor) -> torch.Tensor:
    """Round to 8 significant bits, to nearest, ties to even; in integers."""
    bits, drop = values.abs().view(torch.int64), 45
    low, kept = bits & ((1 << drop) - 1), bits >> drop
    half = 1 << (drop - 1)
    kept += ((low > half) | ((low == half) & (kept % 2 == 1))).long()
    return (kept << drop).view(torch.float64) * values.sign()
