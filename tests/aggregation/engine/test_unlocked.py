# SPDX-License-Identifier: Apache-2.0
"""The sequences that run without the interpreter's lock compute the bits of the same operations, one by one."""

from __future__ import annotations

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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_differences(differences: Callable[..., list[float]], dtype: torch.dtype) -> None:
    x, y = torch.randn(2, 1003, generator=torch.Generator().manual_seed(4), dtype=dtype)
    errors, ratios = torch.empty_like(x), torch.empty_like(x)
    found = differences(x, y, errors, ratios)
    expected = (x - y).abs()
    assert torch.equal(errors, expected)
    assert torch.equal(ratios, expected / y.abs())
    sums = [x.square().sum(), y.square().sum(), expected.amax(), expected.sum(), expected.square().sum()]
    assert found == pytest.approx([*map(float, sums), float(ratios.amax()), float(ratios.sum())], rel=1e-5)
    assert differences(x, x, errors, ratios)[2:] == [0.0]


@pytest.mark.parametrize("count", [1, 127, 128, 129, 5000])
@pytest.mark.parametrize("compiled", [True, False])
def test_bfloat16_rounds_once(count: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to points halfway between two numbers, at both ends of rows, with and without a factor."""
    if not compiled:
        function = unlocked._multiply_and_round_twice
        monkeypatch.setattr("nvflare_lazy.aggregation._engine.rounding.multiply_and_round_twice", function)
    near = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).bfloat16().double()
    for offset, error in ((0, 0.0), (1, 2.0**-40), (2, -(2.0**-40)), (3, 2.0**-9)):
        near[offset::4] *= 1 + 2.0**-8 + error
    out = torch.empty(count, dtype=torch.bfloat16)
    round_into(out, near * 4, Arena(16 * count + 4096), factor=0.25)
    assert torch.equal(out.double(), round_by_bits(near))


def round_by_bits(values: torch.Tensor) -> torch.Tensor:
    """Round to 8 significant bits, to nearest, ties to even; in integers."""
    bits, drop = values.abs().view(torch.int64), 45
    low, kept = bits & ((1 << drop) - 1), bits >> drop
    half = 1 << (drop - 1)
    kept += ((low > half) | ((low == half) & (kept % 2 == 1))).long()
    return (kept << drop).view(torch.float64) * values.sign()
