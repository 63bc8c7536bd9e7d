# SPDX-License-Identifier: Apache-2.0
"""Weights: which are accepted, and means with extreme ones, compared with fractions."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvflare_lazy.aggregation import Aggregation, CoordinateRule, aggregate
from nvflare_lazy.errors import WeightError
from tests.aggregation.contributions import bits

LARGEST = torch.finfo(torch.float64).max
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
CLIPPED = {"name": "clipped_mean", "clip_norm": 4.0}
EXTREME = st.sampled_from([5e-324, 1e-320, 2.0**-1022, 1e-200, 0.1, 1.0, 3.0, 1e12, 1e200, 1e308, LARGEST])


class Weighted(CoordinateRule):
    """A custom rule that computes with weights in the obvious way."""

    def combine(self, values, weights):
        return (values * weights[:, None]).sum(0) / weights.sum()


def exact_mean(values, weights):
    total = sum(map(Fraction, weights))
    return sum(Fraction(weight) * Fraction(value) for weight, value in zip(weights, values, strict=True)) / total


def run(tmp_path_factory, values, weights, rule="mean", dtype=torch.float64, **options):
    contributions = {
        f"site-{n}": {"w": torch.tensor([v, v, 0.0], dtype=torch.float64).to(dtype)} for n, v in enumerate(values)
    }
    out = tmp_path_factory.getbasetemp() / "weighted.safetensors"
    stated = {f"site-{n}": weight for n, weight in enumerate(weights)}
    return Aggregation(rule, fsync=False, threads=1, **options).run(contributions, out, weights=stated)


@pytest.mark.parametrize("weight", [3, 3.0, np.float32(3), np.int64(3), np.float16(3), Fraction(3)])
def test_real_numbers(tmp_path_factory, weight):
    """Real numbers of every type are weights."""
    assert run(tmp_path_factory, [1.0, 5.0], [1, weight]).tensors["w"][0].item() == 4


@pytest.mark.parametrize(
    "weight",
    [
        *(-1, math.nan, math.inf, -math.inf, np.float64("nan"), 10**400, -(10**400), True, np.True_, "3", b"3", None),
        *(Decimal(3), 3j, torch.tensor(3.0), torch.ones(2), np.ones(1), [3], {}, object()),
    ],
)
def test_other_values(tmp_path_factory, weight):
    """Everything else is an error that names the contributor."""
    with pytest.raises(WeightError, match=r"the weight of 'site-1' must be zero or a positive number, got"):
        run(tmp_path_factory, [1.0, 5.0], [1, weight])


@given(
    st.lists(st.tuples(EXTREME, st.integers(-100, 100)), min_size=1, max_size=5),
    st.sampled_from(DTYPES),
    st.sampled_from(["mean", Weighted()]),
)
def test_mean_with_extreme_weights(tmp_path_factory, pairs, dtype, rule):
    """The mean of finite values is their mean, whatever the weights, and the shares have the sum 1."""
    weights, values = zip(*pairs, strict=True)
    result = run(tmp_path_factory, values, weights, rule, dtype)
    right = exact_mean(values, weights)
    found = Fraction(result.tensors["w"][0].item())
    step = 1 if dtype is torch.int64 else torch.finfo(dtype).eps * max(map(abs, values))
    assert abs(found - right) <= Fraction(step) * Fraction(51, 100) + Fraction(1, 10**13)
    if rule == "mean":
        assert math.fsum(result.report.provenance.weights.values()) == pytest.approx(1)


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=4),
    st.integers(-900, 900),
    st.sampled_from(["mean", "geometric_median", CLIPPED, Weighted()]),
    st.sampled_from([torch.float64, torch.bfloat16]),
)
def test_power_of_two(tmp_path_factory, weights, power, rule, dtype):
    """Weights times a power of two give the same bits, under every rule that uses them."""
    values = [0.1 * number for number in range(len(weights))]
    scaled = [math.ldexp(weight, power) for weight in weights]
    results = [run(tmp_path_factory, values, w, rule, dtype, params_type="DIFF") for w in (weights, scaled)]
    assert bits(results[0].tensors) == bits(results[1].tensors)


@pytest.mark.parametrize("rule", ["geometric_median", CLIPPED, {**CLIPPED, "noise_multiplier": 1e-9, "seed": 1}])
@pytest.mark.parametrize("weight", [5e-324, 1e308])
def test_rules_with_extreme_weights(tmp_path_factory, rule, weight):
    """Equal weights are equal at any scale, and the scale of the noise follows the ratios of the weights."""
    right, found = (run(tmp_path_factory, [1.0, 1.5, 2.0], [w] * 3, rule, params_type="DIFF") for w in (1.0, weight))
    assert bits(found.tensors) == bits(right.tensors)
    assert found.report.provenance.decisions == right.report.provenance.decisions


def test_an_unreachable_update_with_all_the_weight(tmp_path_factory):
    """An update that the geometric median ignores does not take the weight of the others with it."""
    result = run(tmp_path_factory, [math.inf, 1.0, 2.0, 2.0], [1e308, 5e-324, 5e-324, 5e-324], "geometric_median")
    assert result.tensors["w"][0].item() == pytest.approx(2)


def test_a_tensor_of_contributors_with_tiny_weights(tmp_path):
    """Only the weights of contributions that have a tensor count, whatever the weights of the others."""
    contributions = {"a": {"w": torch.ones(1)}} | {
        name: {"w": torch.ones(1), "v": torch.tensor([value])} for name, value in (("b", 1.0), ("c", 4.0))
    }
    result = aggregate(contributions, tmp_path / "x.safetensors", weights={"a": 1e308, "b": 5e-324, "c": 1e-323})
    assert result["v"].item() == 3


@given(
    st.lists(st.sampled_from([LARGEST, -LARGEST, LARGEST / 2, LARGEST / 3, 1.0, -1e300, 0.0]), min_size=1, max_size=5),
    st.sampled_from(["mean", "median", {"name": "trimmed_mean", "num_byzantine": 0}, "geometric_median"]),
)
def test_values_next_to_the_maximum(tmp_path_factory, values, rule):
    """A mean of finite float64 numbers is finite, although their sum is not."""
    for weights in ([1] * len(values), [0.1 + n for n in range(len(values))]):
        found = run(tmp_path_factory, values, weights, rule).tensors["w"][0].item()
        assert math.isfinite(found)
        if rule == "mean":
            right = exact_mean(values, weights)
            assert abs(Fraction(found) - right) <= Fraction(max(map(abs, values))) / 2**50


def test_infinite_norms(tmp_path_factory):
    """Updates whose norm is too large for float64 have no influence on a clipped mean; the rest is zero."""
    result = run(tmp_path_factory, [1e200, 1e200], [1, 1], CLIPPED, params_type="DIFF")
    assert result.tensors["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("rule", ["geometric_median", CLIPPED, {"name": "krum", "num_byzantine": 0}])
def test_integers_only(tmp_path_factory, rule):
    """Rules that compare updates by their floating-point tensors accept updates without any."""
    result = run(tmp_path_factory, [2, 2, 2], [1, 1, 1], rule, torch.int64, params_type="DIFF")
    assert result.tensors["w"].tolist() == [2, 2, 0]
