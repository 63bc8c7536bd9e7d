# SPDX-License-Identifier: Apache-2.0
"""Every rule against its paper's formula in plain NumPy, and against the contract of all rules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvflare_lazy.aggregation import (
    Aggregation,
    Bulyan,
    ClippedMean,
    CoordinateRule,
    GeometricMedian,
    Krum,
    LinearCombination,
    Mean,
    Median,
    MultiKrum,
    PairwiseDistances,
    Rule,
    TrimmedMean,
    rule_names,
    to_rule,
)
from nvflare_lazy.aggregation.testing import RuleContract
from nvflare_lazy.errors import MissingReferenceError
from tests.aggregation.contributions import INTEGERS, flat, matrix, random_round, rounds, ulps
from tests.aggregation.rules import reference_rules as reference


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A file to write to, again and again."""
    return tmp_path_factory.mktemp("rules") / "out.safetensors"


def run(rule, contributions, out, **kwargs):
    settings = {key: kwargs.pop(key) for key in ("params_type",) if key in kwargs}
    return Aggregation(rule, fsync=False, threads=2, **settings).run(contributions, out, **kwargs)


def assert_rounded(tensors, expected, *, error=1e-13):
    """The result is the expected one, rounded once, where that itself has some error of float64."""
    assert np.all(np.abs(flat(tensors) - expected) <= 0.5 * ulps(tensors) * (1 + 1e-9) + error * (1 + np.abs(expected)))


whole_weights = st.lists(st.integers(1, 1000), min_size=9, max_size=9)
any_weights = st.lists(st.floats(1e-3, 1e3), min_size=9, max_size=9)


@given(
    rounds(dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16, *INTEGERS)), whole_weights | any_weights
)
def test_mean(out, contributions, weights):
    """The weighted mean, of floating-point numbers and of whole ones."""
    weights = dict(zip(sorted(contributions), weights, strict=False))
    result = run(Mean(), contributions, out, weights=weights)
    assert_rounded(result.tensors, reference.mean(matrix(contributions), [*weights.values()]))


@given(rounds(dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16, *INTEGERS)))
def test_median(out, contributions):
    """NumPy's median, with ties, of odd and even numbers of contributors."""
    assert_rounded(run(Median(), contributions, out).tensors, reference.median(matrix(contributions)))


@given(rounds(least=3, dtypes=(torch.float32, torch.float16, torch.int64)), st.integers(0, 4))
def test_trimmed_mean(out, contributions, byzantine):
    """Sorted, cut at both ends, averaged."""
    byzantine = min(byzantine, (len(contributions) - 1) // 2)
    result = run(TrimmedMean(byzantine), contributions, out)
    assert_rounded(result.tensors, reference.trimmed_mean(matrix(contributions), byzantine))


@given(rounds(least=3), st.integers(0, 3))
def test_krum(out, contributions, byzantine):
    """The winner by definition, unchanged."""
    byzantine = min(byzantine, (len(contributions) - 3) // 2)
    updates = matrix(contributions)
    result = run(Krum(byzantine), contributions, out)
    np.testing.assert_array_equal(flat(result.tensors), updates[reference.krum(updates, byzantine)])


@given(rounds(least=3), st.integers(0, 3), st.none() | st.integers(1, 9))
def test_multi_krum(out, contributions, byzantine, keep):
    """The mean of the winners by definition; by default the largest safe number of winners."""
    byzantine = min(byzantine, (len(contributions) - 3) // 2)
    safe = len(contributions) - byzantine - 2
    keep = None if keep is None else min(keep, safe)
    result = run(MultiKrum(byzantine, keep), contributions, out)
    assert_rounded(result.tensors, reference.multi_krum(matrix(contributions), byzantine, keep or safe))


@given(rounds(least=3, most=12, dtypes=(torch.float64, torch.float32, torch.float16)), st.integers(0, 2))
def test_bulyan(out, contributions, byzantine):
    """Krum's choices, and of each element the values around the median."""
    byzantine = min(byzantine, (len(contributions) - 3) // 4)
    result = run(Bulyan(byzantine), contributions, out)
    assert_rounded(result.tensors, reference.bulyan(matrix(contributions), byzantine))


@given(rounds(dtypes=(torch.float64,), ties=False), any_weights)
def test_geometric_median(out, contributions, weights):
    """Weiszfeld's algorithm, here on the updates themselves and to its end."""
    weights = dict(zip(sorted(contributions), weights, strict=False))
    result = run(
        GeometricMedian(smoothing=1e-3, iterations=10_000, tolerance=1e-13), contributions, out, weights=weights
    )
    expected = reference.geometric_median(matrix(contributions), [*weights.values()], 1e-3)
    np.testing.assert_allclose(
        flat(result.tensors), expected, rtol=0, atol=1e-6 * (1 + np.abs(matrix(contributions)).max(initial=0))
    )


@given(
    rounds(dtypes=(torch.float64, torch.float32, torch.bfloat16)), whole_weights, st.floats(1e-3, 1e4), st.booleans()
)
def test_clipped_mean(out, contributions, weights, clip_norm, is_full):
    """Differences are scaled down to the norm before they are averaged; whole models by way of the global one."""
    weights = dict(zip(sorted(contributions), weights, strict=False))
    updates = matrix(contributions)
    globally = random_round(1, [(value.shape, value.dtype) for value in contributions["site-0"].values()], 7)["site-0"]
    origin = matrix({"": globally})[0] if is_full else np.zeros(updates.shape[1])
    result = run(
        ClippedMean(clip_norm),
        contributions,
        out,
        weights=weights,
        reference=globally if is_full else None,
        params_type="FULL" if is_full else "DIFF",
    )
    expected = reference.clipped_mean(updates, [*weights.values()], clip_norm, origin)
    assert_rounded(result.tensors, expected, error=1e-12)


class TestMeanHolds(RuleContract):
    rule = Mean()


class TestMedianHolds(RuleContract):
    rule = Median()


class TestTrimmedMeanHolds(RuleContract):
    rule = TrimmedMean(num_byzantine=2)


class TestKrumHolds(RuleContract):
    rule = Krum(num_byzantine=2)


class TestMultiKrumHolds(RuleContract):
    rule = MultiKrum(num_byzantine=2, num_selected=3)


class TestBulyanHolds(RuleContract):
    rule = Bulyan(num_byzantine=1)


class TestGeometricMedianHolds(RuleContract):
    rule = GeometricMedian()


class TestClippedMeanHolds(RuleContract):
    rule = ClippedMean(clip_norm=5.0)


class Midrange(CoordinateRule):
    """A rule as a user would write it."""

    def combine(self, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (values.amin(0) + values.amax(0)) / 2


class TestUsersCoordinateRuleHolds(RuleContract):
    rule = Midrange()


class WithoutTheFarthest(Rule):
    """A user's rule that looks at whole updates first."""

    min_contributors = 2
    requires_all_tensors = True

    def prepare(self, this_round):
        farthest = this_round.compute_statistic(PairwiseDistances()).sum(axis=1).argmax()
        this_round.annotate(farthest=this_round.names[farthest])
        return LinearCombination([weight * (i != farthest) for i, weight in enumerate(this_round.weights)])


class TestUsersRuleOfWholeUpdatesHolds(RuleContract):
    rule = WithoutTheFarthest()


@pytest.mark.parametrize(
    ("rule", "liars"),
    [
        (Median(), 4),
        (TrimmedMean(3), 3),
        (Krum(3), 3),
        (MultiKrum(3), 3),
        (Bulyan(1), 1),
        (GeometricMedian(), 4),
        (ClippedMean(clip_norm=3.0), 1),
    ],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("lie", [1e6, float("inf"), float("nan")])
def test_liars_do_not_get_through(out, rule, liars, lie):
    """With as many malicious clients as the rule tolerates, the result stays close to the honest mean."""
    random = np.random.default_rng(0)
    contributions = {f"site-{i}": {"w": torch.tensor(random.normal(1, 0.1, 500))} for i in range(9)}
    for name in list(contributions)[:liars]:
        contributions[name] = {"w": torch.full((500,), lie, dtype=torch.float64)}
    result = run(rule, contributions, out, params_type="DIFF")
    assert np.abs(flat(result.tensors) - 1).max() < 1.5


@pytest.mark.parametrize("name", [name for name in rule_names() if name != "clipped_mean"])
def test_every_rule_goes_by_its_name(name):
    """A name alone is enough for all rules that need no parameter."""
    assert to_rule(name).name == to_rule({"name": name}).name == name


def test_a_rule_of_ones_own_goes_by_its_name():
    """With its module, wherever names are wanted."""
    assert to_rule({"name": "nvflare_lazy.aggregation.rules.krum.Krum", "num_byzantine": 3}) == Krum(3)


def test_a_configuration_may_say_byzantine():
    """Short for num_byzantine, in the rules that have it."""
    assert to_rule({"name": "bulyan", "byzantine": 2}) == Bulyan(2)
    with pytest.raises(ValueError, match="byzantine"):
        to_rule({"name": "median", "byzantine": 2})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("avg", "unknown aggregation rule 'avg'; available: mean, median"),
        ("no_such_module.Rule", "cannot import aggregation rule 'no_such_module.Rule': No module named"),
        ("json.Rule", "cannot import aggregation rule 'json.Rule': module 'json' has no attribute"),
        ("json.JSONDecoder", "invalid aggregation rule 'json.JSONDecoder': expected a subclass"),
        ({"name": "krum", "num_byzantine": -1}, "num_byzantine .* must be a non-negative integer"),
        ({"name": "trimmed_mean", "num_byzantine": 0.2}, "num_byzantine .* must be a non-negative integer"),
        ({"name": "krum", "f": 2}, "unexpected keyword argument 'f'"),
        ("clipped_mean", "missing 1 required positional argument: 'clip_norm'"),
        ({"name": "clipped_mean", "clip_norm": 0}, "clip_norm must be a positive number"),
        ({"name": "clipped_mean", "clip_norm": 1, "noise_multiplier": -1}, "noise_multiplier must be zero or"),
        ({"name": "multi_krum", "num_selected": 0}, "num_selected .* must be at least 1"),
        ({"name": "geometric_median", "smoothing": 0}, "smoothing must be positive"),
    ],
)
def test_wrong_parameters(wrong, message):
    """An invalid configuration raises an error when it is read."""
    with pytest.raises(ValueError, match=message):
        to_rule(wrong)


def test_clipping_whole_models_needs_the_global_model(out):
    """Without a reference model the rule has no differences to clip."""
    with pytest.raises(MissingReferenceError, match="pass the global model as reference"):
        run(ClippedMean(1.0), random_round(3, [((4,), torch.float32)], 0), out)


def test_gathering_needs_whole_updates(out):
    """A rule that omits the declaration raises an error."""

    class Forgetful(WithoutTheFarthest):
        requires_all_tensors = False

    with pytest.raises(TypeError, match="must set requires_all_tensors = True"):
        run(Forgetful(), random_round(3, [((4,), torch.float32)], 0), out)


def test_combine_must_return_a_number_for_each_element(out):
    """The error for a rule that returns another type names the expected one."""

    class Wrong(CoordinateRule):
        def combine(self, values, weights):
            return values

    with pytest.raises(TypeError, match="must return 4 float64 numbers, one for each column"):
        run(Wrong(), random_round(3, [((4,), torch.float32)], 0), out)


class TestNoise:
    """Gaussian noise on the clipped mean."""

    def difference(self, out, contributions, **kwargs):
        noisy = run(ClippedMean(clip_norm=2.0, noise_multiplier=0.5, **kwargs), contributions, out, params_type="DIFF")
        values = flat(noisy.tensors)
        plain = run(ClippedMean(clip_norm=2.0), contributions, out, params_type="DIFF")
        return values - flat(plain.tensors), noisy

    def contributions(self, size=200_000):
        return {f"site-{i}": {"w": torch.full((size,), 1e-3, dtype=torch.float64)} for i in range(4)}

    def test_has_the_scale_that_the_metadata_states(self, out):
        """Standard deviation: multiplier times norm, over the number of contributors; independent and without bias."""
        noise, result = self.difference(out, self.contributions())
        stated = result.report.provenance.decisions["noise_std"]
        assert stated == 0.5 * 2.0 / 4
        assert abs(noise.std() / stated - 1) < 0.01
        assert abs(noise.mean()) < 5 * stated / np.sqrt(len(noise))
        assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.01
        assert abs(np.mean(noise > stated) - 0.1587) < 0.005

    def test_is_seeded_from_the_system_unless_told(self, out):
        """Two runs differ; two runs with a seed do not, and the result never contains the seed."""
        some = self.contributions(2000)
        assert not np.array_equal(self.difference(out, some)[0], self.difference(out, some)[0])
        first, result = self.difference(out, some, seed=123456789)
        assert np.array_equal(first, self.difference(out, some, seed=123456789)[0])
        assert not np.array_equal(first, self.difference(out, some, seed=987654321)[0])
        assert "123456789" not in repr(result)
        assert "123456789" not in str(result.tensors.metadata)

    def test_nothing_private_is_stated(self, out):
        """With noise, neither norms nor clip factors of single contributors leave the server."""
        _, noisy = self.difference(out, self.contributions(100))
        assert noisy.report.provenance.decisions.keys() == {"noise_std", "seeded_by"}
        assert noisy.report.provenance.weights is None

    def test_depends_on_no_tile(self, out):
        """The same seed gives the same noise, whatever the tiles and threads are."""
        contributions = random_round(4, [((50_000,), torch.float32), ((7, 9), torch.float32)], 0)
        rule = ClippedMean(1.0, 1.0, seed=5)
        results = [
            flat(
                Aggregation(rule, "DIFF", tile_size=tile, threads=threads, fsync=False).run(contributions, out).tensors
            )
            for tile, threads in [("4KiB", 1), ("20KiB", 8), (None, 2)]
        ]
        np.testing.assert_array_equal(results[0], results[1])
        np.testing.assert_array_equal(results[0], results[2])

    def test_spares_counters(self, out):
        """Integers get no noise."""
        contributions = {f"site-{i}": {"n": torch.tensor([10, 20]), "w": torch.ones(3)} for i in range(3)}
        result = run(ClippedMean(1e3, 1.0), contributions, out, params_type="DIFF").tensors
        assert result["n"].tolist() == [10, 20]
        assert result["w"].tolist() != [1, 1, 1]
