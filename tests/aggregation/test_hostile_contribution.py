# SPDX-License-Identifier: Apache-2.0
"""With one hostile contribution, the result equals the result of the others, bit for bit, under every rule."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvflare_lazy.aggregation import Aggregation, to_rule
from nvflare_lazy.tensors.byte_source import FailedSource
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from tests.aggregation.contributions import bits

RULES = (
    *("mean", "median", "geometric_median", {"name": "clipped_mean", "clip_norm": 2.0}),
    *({"name": name, "num_byzantine": 1} for name in ("trimmed_mean", "krum", "multi_krum")),
    {"name": "bulyan", "num_byzantine": 0},
)
HONEST = {"f": ((3, 5), torch.float32), "h": ((7,), torch.bfloat16), "n": ((), torch.int64), "e": ((0,), torch.float32)}
# Types that are a mismatch wherever a tensor of another type is expected.
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int32, torch.uint64, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
)


class Odd(dict):
    """A contribution that cannot be listed."""

    def items(self):
        raise RuntimeError("odd")


class Surprise:
    """A value that raises whatever one does with it."""

    def __getattr__(self, name):
        raise ValueError(name)

    def __repr__(self):
        raise ValueError("repr")


def tensor(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 10
    return torch.complex(values, values).to(dtype) if dtype.is_complex else values.to(dtype)


def model(seed):
    return {name: tensor(shape, dtype, seed) for name, (shape, dtype) in HONEST.items()}


def lazy(dtype, shape, error=None):
    source = FailedSource(math.prod(shape) * dtype.itemsize, error or OSError("lost"))
    return LazyTensor(source, dtype, shape)


def nan(value):
    poisoned = torch.zeros(3, 5)
    poisoned[1, 2] = value
    return poisoned


# By name: Hypothesis prints what it draws, and some of these do not let themselves be printed.
VALUES = {
    **{f"{dtype}": lambda dtype=dtype: tensor((3, 5), dtype, 9) for dtype in DTYPES},
    **{
        f"shape {list(shape)}": lambda shape=shape: torch.ones(shape)
        for shape in ((), (0,), (15,), (5, 3), (3, 5, 1), (1,) * 60)
    },
    **{f"{value}": lambda value=value: nan(value) for value in (math.nan, math.inf, -math.inf)},
    **{
        f"array {kind}": lambda kind=kind: np.zeros((3, 5), dtype=kind)
        for kind in ("S3", "U4", "O", "M8[s]", "m8[ns]", "V8", "i4,f8", ">i8", "g", "G", "?")
    },
    **{
        f"a {type(value).__name__}": lambda value=value: value
        for value in (
            None,
            1.5,
            10**5000,
            "text",
            b"bytes",
            [1.0],
            {"f": 1},
            torch.float32,
            object(),
            Surprise(),
            Odd(),
        )
    },
    **{
        f"failed {type(error).__name__}": lambda error=error: lazy(torch.float32, (3, 5), error)
        for error in (OSError("x\n\x1b"), KeyError(3), RuntimeError(), ValueError("\u202e" * 9999), OverflowError())
    },
    "failed array": lambda: LazyArray(FailedSource(60, OSError("lost")), np.float32, (3, 5)),
    "huge": lambda: lazy(torch.float32, (10**12,)),
    "sparse": lambda: torch.ones(3, 5).to_sparse(),
    "meta": lambda: torch.ones(3, 5, device="meta"),
}
CONTRIBUTIONS = {
    **{name: lambda value=value: {**model(7), "f": value()} for name, value in VALUES.items()},
    **{
        f"name of {type(name).__name__} {str(name)[:2]!r}": lambda name=name: {**model(7), name: torch.ones(2)}
        for name in ("\n", "", 3, None, b"f", ("f",), "x" * 100_000)
    },
    **{
        f"contribution: {type(value).__name__}": lambda value=value: value
        for value in (Odd(), None, 3, "text", [torch.ones(3)], Surprise())
    },
    "contribution without tensors": dict,
}


@given(
    st.sampled_from(sorted(CONTRIBUTIONS)),
    st.sampled_from(["", "site-1.5", "zz", "\x1b[2J\n"]),
    st.sampled_from([5e-324, 1.0, 7, 1e308]),
    st.sampled_from(RULES),
    st.booleans(),
)
def test_hostile_contribution(tmp_path_factory, kind, name, weight, rule, is_diff):
    """Whatever one contributor sends, first or last by name, with any weight, among as few others as the rule needs."""
    honest = {f"site-{number}": model(number) for number in range(to_rule(rule).min_contributors)}
    weights = {site: number + 1.5 for number, site in enumerate(honest)}
    out = tmp_path_factory.getbasetemp() / "hostile.safetensors"
    aggregation = Aggregation(
        rule, "DIFF" if is_diff else "FULL", on_mismatch="skip", on_non_finite="skip", fsync=False, threads=1
    )
    expected = aggregation.run(honest, out, weights=weights, reference=model(8))
    right = bits(expected.tensors)
    result = aggregation.run(
        {**honest, name: CONTRIBUTIONS[kind]()}, out, weights={**weights, name: weight}, reference=model(8)
    )
    assert bits(result.tensors) == right
    assert set(result.report.skipped) == {name}
    assert result.report.provenance.weights == expected.report.provenance.weights


@pytest.mark.parametrize("order", [1, -1])
@given(st.sampled_from(sorted(VALUES)))
def test_without_a_reference(tmp_path_factory, order, kind):
    """Two others are enough, if the global model is unknown."""
    names = ["a", "b", "c"][::order]
    honest = {names[1]: model(1), names[2]: model(2)}
    out = tmp_path_factory.getbasetemp() / "hostile.safetensors"
    aggregation = Aggregation(on_mismatch="skip", on_non_finite="skip", fsync=False, threads=1)
    right = bits(aggregation.run(honest, out).tensors)
    result = aggregation.run({**honest, names[0]: CONTRIBUTIONS[kind]()}, out)
    assert bits(result.tensors) == right
    assert set(result.report.skipped) == {names[0]}
