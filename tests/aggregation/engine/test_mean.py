# SPDX-License-Identifier: Apache-2.0
"""Means are exact where they promise it, and rounded once everywhere."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvflare_lazy.aggregation import aggregate
from nvflare_lazy.aggregation._engine import mean as exact_mean
from nvflare_lazy.aggregation._engine._exact_sum import inexact_flag
from nvflare_lazy.aggregation._engine.mean import Weights, mean_into
from nvflare_lazy.aggregation._engine.memory_plan import Arena
from nvflare_lazy.aggregation._engine.rounding import NARROW, round_into

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
EIGHT_BITS = sorted(NARROW - {*SIXTEEN_BITS}, key=str)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64)
EXAMPLES = 4000


@pytest.fixture(autouse=True)
def _one_thread():
    """As in the engine's threads; otherwise the inexact flag is not trusted."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def finite_numbers(dtype):
    """All finite numbers of a narrow type, in order."""
    width = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    everything = torch.arange(1 << (8 * dtype.itemsize), dtype=torch.int64).to(width).view(dtype).double()
    return sorted(set(everything[torch.isfinite(everything)].tolist()))


def rounded(exact, dtype, numbers):
    """The number of a narrow type next to a fraction; of two, the even one."""
    place = bisect.bisect_left(numbers, exact)
    if place < len(numbers) and numbers[place] == exact:
        return numbers[place]
    low, high = numbers[place - 1], numbers[place]
    middle = (Fraction(low) + Fraction(high)) / 2
    if exact != middle:
        return low if exact < middle else high
    width = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    return high if torch.tensor(low).to(dtype).view(width).item() % 2 else low


def exact_means(contributions, weights):
    """Means in fractions."""
    total = sum(map(Fraction, weights))
    columns = zip(*(values.double().tolist() for values in contributions), strict=True)
    return [
        sum(Fraction(weight) * Fraction(value) for weight, value in zip(weights, column, strict=True)) / total
        for column in columns
    ]


def mean(contributions, weights):
    out = torch.empty_like(contributions[0])
    mean_into(out, contributions.__getitem__, Weights.of(weights), Arena(1 << 20))
    return out


def narrow_values(random, kind, dtype, size):
    """Values of some kind that a mean could get wrong."""
    if kind == "normal":
        values = torch.tensor(random.normal(size=size)).to(dtype)
    elif kind == "small":  # below the normal range of float16, and of the 8-bit types
        values = torch.tensor(random.normal(size=size) * 2.0**-16).to(dtype)
    elif kind == "wide":  # sums that do not fit into float64
        values = torch.tensor(random.normal(size=size) * 2.0 ** random.integers(-130, 12, size)).to(dtype)
    elif kind == "ties":
        values = torch.tensor(random.integers(-300, 300, size) * 0.5).to(dtype)
    else:  # any bits at all
        width = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
        raw = random.integers(0, 1 << (8 * dtype.itemsize), size)
        values = torch.tensor(raw).to(width).view(dtype)
        # Not so large that a sum might overflow what the type can hold.
        values = torch.where(values.float().abs() < torch.finfo(dtype).max / 2, values.float(), 0.0).to(dtype)
    return torch.where(torch.isfinite(values.float()), values.float(), 0.0).to(dtype)


WEIGHTS = {
    "equal": lambda random, count: [1.0] * count,
    "counts": lambda random, count: random.integers(1, 5000, count).tolist(),
    "decimals": lambda random, count: [0.1 * (1 + number % 9) for number in range(count)],
    "any": lambda random, count: random.uniform(1e-6, 1, count).tolist(),
}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", ["normal", "small", "wide", "ties", "any bits"])
@pytest.mark.parametrize("dtype", [*SIXTEEN_BITS, *EIGHT_BITS], ids=str)
def test_narrow_means_are_the_exact_ones_rounded_once(dtype, kind, weights):
    """In every element, for numbers of contributors from two to 64, and for every kind of values and weights."""
    random = np.random.default_rng(sum(map(ord, f"{dtype}{kind}{weights}")))
    numbers = finite_numbers(dtype)
    for count in (2, 3, 5, 64):
        size = 40 + 1200 // count
        contributions = [narrow_values(random, kind, dtype, size) for _ in range(count)]
        chosen = WEIGHTS[weights](random, count)
        expected = [rounded(exact, dtype, numbers) for exact in exact_means(contributions, chosen)]
        assert mean(contributions, chosen).double().tolist() == expected, count


def test_64_bfloat16_contributions(tmp_path):
    """Through the whole engine: correctly rounded in every element, where sums in float64 or bfloat16 are not."""
    random = np.random.default_rng(1)
    numbers = finite_numbers(torch.bfloat16)
    contributions = {
        f"site-{number:02d}": {"w": narrow_values(random, "wide" if number % 2 else "normal", torch.bfloat16, EXAMPLES)}
        for number in range(64)
    }
    values = [contributions[name]["w"] for name in sorted(contributions)]
    expected = torch.tensor([rounded(exact, torch.bfloat16, numbers) for exact in exact_means(values, [1] * 64)])
    result = aggregate(contributions, tmp_path / "mean.safetensors")["w"].float()
    assert torch.equal(result, expected.float())
    in_bfloat16 = sum(values[1:], start=values[0]) / 64
    assert (in_bfloat16.float() != expected).float().mean() > 0.5


def test_float16_does_not_overflow(tmp_path):
    """Values of 100 with weights of 1000, whose products no float16 can hold."""
    contributions = {f"site-{number}": {"w": torch.full((3,), 100.0, dtype=torch.float16)} for number in range(4)}
    result = aggregate(contributions, tmp_path / "mean.safetensors", weights=dict.fromkeys(contributions, 1000))
    assert result["w"].tolist() == [100, 100, 100]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_means_are_exact(dtype):
    """The exact mean, rounded half to even, up to the limits of 64 bits."""
    random = np.random.default_rng(2)
    limits = torch.iinfo(dtype)
    for count, weights in [(2, [1, 1]), (3, [1, 1, 1]), (5, [3, 1, 4, 1, 5]), (4, [0.1, 0.2, 0.3, 0.4])]:
        columns = [
            [int(random.integers(0, 20)) for _ in range(50)]
            + [limits.min, limits.max, limits.max - number, limits.max // 2 - number]
            + [int(random.integers(limits.min, limits.max, dtype=np.uint64 if limits.max > 2**63 else np.int64))]
            for number in range(count)
        ]
        contributions = [torch.tensor(column, dtype=dtype) for column in columns]
        total = sum(map(Fraction, weights))
        expected = [
            round(sum(Fraction(weight) * value for weight, value in zip(weights, row, strict=True)) / total)
            for row in zip(*columns, strict=True)
        ]
        assert mean(contributions, weights).tolist() == expected


@given(st.lists(st.integers(0, 1), min_size=1, max_size=9))
def test_bools_are_the_rounded_mean(tmp_path_factory, values):
    """True where more than half are; a bool that is another byte than 0 or 1 counts no more than others."""
    out = tmp_path_factory.getbasetemp() / "bools.safetensors"
    contributions = {
        f"site-{number}": {"b": torch.tensor([value * 255], dtype=torch.uint8).view(torch.bool)}
        for number, value in enumerate(values)
    }
    assert aggregate(contributions, out, fsync=False)["b"].tolist() == [sum(values) * 2 > len(values)]


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=2, max_size=8),
    st.lists(st.integers(1, 10_000), min_size=8, max_size=8),
)
def test_float32_is_within_one_ulp_of_the_exact_mean(values, weights):
    """Even where it nearly cancels out: the error is half an ulp of the result, and float64's of the largest term."""
    weights = weights[: len(values)]
    contributions = [torch.tensor([value], dtype=torch.float32) for value in values]
    [exact] = exact_means(contributions, weights)
    result = mean(contributions, weights).item()
    ulp = max(math.ulp(abs(result)) * 2**29, 2.0**-149)
    assert abs(Fraction(result) - exact) <= Fraction(ulp) / 2 + Fraction(max(map(abs, values))) / 2**48


@pytest.mark.parametrize("dtype", [*SIXTEEN_BITS, *EIGHT_BITS], ids=str)
def test_rounding_once(dtype):
    """Float64 next to halfway points, which a rounding by way of float32 moves onto them, for every one there is."""
    numbers = finite_numbers(dtype)
    cases, expected = [], []
    for low, high in pairwise(numbers):
        middle = (low + high) / 2
        cases += [math.nextafter(middle, -math.inf), middle, math.nextafter(middle, math.inf)]
        expected += [low, rounded(Fraction(middle), dtype, numbers), high]
    out = torch.empty(len(cases), dtype=dtype)
    values = torch.tensor(cases, dtype=torch.float64)
    round_into(out, values.clone(), Arena(1 << 22))
    assert torch.equal(out.double(), torch.tensor(expected, dtype=torch.float64))
    if dtype in SIXTEEN_BITS:
        assert not torch.equal(values.to(dtype).double(), out.double()), "torch rounds once by now: do as it does"


@pytest.mark.parametrize("count", [256, 1000, 70_000])
def test_minus_zeros_hide_nothing(count):
    """Minus zero has the bits that the search looks for; elements that need a correction are still found among them."""
    values = torch.full((count,), -0.0, dtype=torch.float64)
    above_halfway = math.nextafter(1 + 2**-8, math.inf)
    values[0], values[count // 2], values[-1] = above_halfway, -above_halfway, above_halfway
    out = torch.empty(count, dtype=torch.bfloat16)
    round_into(out, values.clone(), Arena(1 << 22))
    expected = values.clone()
    expected[0], expected[count // 2], expected[-1] = 1 + 2**-7, -1 - 2**-7, 1 + 2**-7
    assert torch.equal(out.double(), expected)
    assert int(torch.signbit(out).sum()) == count - 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2], ids=str)
def test_infinity_and_nan(dtype):
    """They go through a mean as through any sum; a NaN has the same bits wherever in a tile it stands."""
    values = torch.tensor([math.inf, -math.inf, math.nan, 1.0, math.inf] * 50)
    others = torch.tensor([1.0, 1.0, 1.0, math.nan, -math.inf] * 50)
    for weights in ([1, 1], [0.1, 0.7]):
        result = mean([values.to(dtype), others.to(dtype)], weights)
        assert result.float().tolist()[:2] == [math.inf, -math.inf]
        assert torch.isnan(result.float()).view(-1, 5).all(dim=0).tolist() == [False, False, True, True, True]
        patterns = result.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize])
        assert len(set(patterns[torch.isnan(result.float())].tolist())) == 1


class TestWeights:
    """Weights are brought into the form that rounds least."""

    @given(st.lists(st.integers(0, 1000), min_size=1, max_size=9).filter(any), st.sampled_from([1, 7, 0.25, 1e-3, 2e9]))
    def test_only_ratios_count(self, counts, scale):
        """Multiples of one number become the smallest whole numbers."""
        weights = Weights.of([count * scale for count in counts])
        if float(scale).is_integer() or scale == 0.25:
            divisor = math.gcd(*counts)
            assert weights.factors == tuple(count / divisor for count in counts)
            assert weights.whole
        ratios = np.array(weights.factors) / weights.total
        np.testing.assert_allclose(ratios, np.array(counts) / sum(counts), rtol=1e-15)

    def test_others_stay_as_they_are(self):
        """Numbers without a common measure are scaled by a power of two, and their sum is kept exactly."""
        stated = (0.1, 0.2, 0.3)
        weights = Weights.of(stated)
        [scale] = {Fraction(one) / Fraction(other) for one, other in zip(weights.factors, stated, strict=True)}
        assert math.frexp(scale)[0] == 0.5
        assert 0.5 < weights.total < 2
        assert not weights.whole
        assert weights.exact_total == scale * sum(map(Fraction, stated))


class TestEffort:
    """Exactness costs only where it is needed."""

    @pytest.fixture
    def steps(self, monkeypatch):
        """Counts the elements that are summed a second time, and those computed in fractions."""
        seen = {"second": 0, "fractions": 0}
        mean_class = exact_mean._Mean
        second, fractions = mean_class._sum_again, mean_class._finish_as_fractions

        def count_second(self, means, places):
            seen["second"] += len(places)
            return second(self, means, places)

        def count_fractions(self, means, places):
            seen["fractions"] += len(places)
            return fractions(self, means, places)

        monkeypatch.setattr(mean_class, "_sum_again", count_second)
        monkeypatch.setattr(mean_class, "_finish_as_fractions", count_fractions)
        return seen

    def test_plain_sums_suffice_for_most(self, steps):
        """Ordinary values with counts for weights are summed once."""
        if inexact_flag() is None:
            pytest.skip("this machine has no inexact flag that works")
        random = np.random.default_rng(0)
        for dtype in SIXTEEN_BITS:
            mean([narrow_values(random, "normal", dtype, EXAMPLES) for _ in range(8)], [300, 250, 1, 7, 90, 5, 5, 5])
        assert steps == {"second": 0, "fractions": 0}

    @pytest.mark.parametrize("weights", [[0.1, 0.9], [0.3, 0.7], [1 / 3, 2 / 3]])
    @pytest.mark.parametrize("kind", ["frozen", "ties", "wide"])
    def test_fractions_are_rare(self, steps, kind, weights):
        """Equal contributions, halfway points and wide sums are decided without them."""
        random = np.random.default_rng(0)
        contributions = [narrow_values(random, "ties", torch.bfloat16, EXAMPLES)] * 2
        if kind != "frozen":
            contributions = [narrow_values(random, kind, torch.bfloat16, EXAMPLES) for _ in range(2)]
        mean(contributions, weights)
        assert steps["fractions"] < EXAMPLES / 1000

    def test_without_a_flag_the_result_is_the_same(self, steps, monkeypatch):
        """A machine that does not say whether it rounded sums twice, and gets the same bits."""
        random = np.random.default_rng(0)
        contributions = [narrow_values(random, "ties", torch.bfloat16, EXAMPLES) for _ in range(3)]
        expected = mean(contributions, [1, 2, 3])
        monkeypatch.setattr("nvflare_lazy.aggregation._engine._exact_sum._flag", lambda: None)
        steps.update(second=0, fractions=0)
        assert torch.equal(mean(contributions, [1, 2, 3]).view(torch.int16), expected.view(torch.int16))
        assert 0 < steps["second"] < EXAMPLES / 5
        assert steps["fractions"] < EXAMPLES / 100


def test_flag_notices_one_rounding_among_many():
    """Wherever in a tensor it happens; and exact operations leave it down."""
    flag = inexact_flag()
    if flag is None:
        pytest.skip("this machine has no inexact flag that works")
    for place in (None, 0, 1, 7, 31, 500, 998, 1000):
        ones, small = torch.ones(1001, dtype=torch.float64), torch.zeros(1001, dtype=torch.float64)
        if place is not None:
            small[place] = 2.0**-60
        flag.clear()
        ones.add_(small, alpha=3.0)
        assert flag.is_up() == (place is not None)
