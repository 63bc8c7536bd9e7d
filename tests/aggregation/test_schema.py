# SPDX-License-Identifier: Apache-2.0
"""The dtypes, shapes and names of a round with a contributor that differs: it costs its own contribution at most."""

from __future__ import annotations

import pytest
import torch

from nvflare_lazy.aggregation import Aggregation, aggregate
from nvflare_lazy.errors import AggregationDtypeError, MismatchError
from tests.aggregation.contributions import bits

REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ODD = (
    *(torch.bool, torch.uint8, torch.int64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "mean.safetensors"


def values(dtype, scale=1.0):
    return (torch.linspace(1, 2, 1500, dtype=torch.float64) * scale).to(dtype)


def model(dtype, scale=1.0):
    return {"w": values(dtype, scale), "n": torch.tensor(3)}


class TestDtypes:
    """One contributor with another dtype, which is first by name, among one or two others."""

    @pytest.mark.parametrize("rule", ["mean", "median"])
    @pytest.mark.parametrize("dtype", ODD)
    def test_reference_decides(self, out, dtype, rule):
        """A dtype that is not converted costs its sender the contribution, even if there is one other only."""
        honest = {"b": model(torch.float32), "c": model(torch.float32, 3)}
        expected = bits(aggregate(honest, out, rule))
        for others in (honest, {"b": honest["b"]}):
            contributions = {"a": model(dtype, 5), **others}
            result = Aggregation(rule, on_mismatch="skip").run(contributions, out, reference=model(torch.float32))
            assert set(result.report.skipped) == {"a"}
            assert isinstance(result.report.skipped["a"], MismatchError)
            assert str(dtype) in str(result.report.skipped["a"])
        assert bits(aggregate({"a": model(dtype, 5), **honest}, out, rule, on_mismatch="skip")) == expected

    @pytest.mark.parametrize("rule", ["mean", "median", {"name": "krum", "num_byzantine": 0}])
    @pytest.mark.parametrize("expected", REAL)
    @pytest.mark.parametrize("sent", REAL)
    def test_another_precision_is_converted(self, out, sent, expected, rule):
        """A contribution in another precision counts as if its sender had converted it."""
        contributions = {"a": model(sent, 5), "b": model(expected), "c": model(expected, 3)}
        converted = {**contributions, "a": {**contributions["a"], "w": contributions["a"]["w"].to(expected)}}
        right = bits(aggregate(converted, out, rule))
        for reference in (None, model(expected)):
            result = aggregate(contributions, out, rule, reference=reference)
            assert result["w"].dtype is expected
            assert bits(result) == right

    def test_reference_decides_against_all(self, out):
        """The result has the precision of the global model, even if all contributors send another one."""
        result = aggregate({name: model(torch.bfloat16) for name in "ab"}, out, reference=model(torch.float32))
        assert result["w"].dtype is torch.float32

    def test_differences_keep_their_precision(self, out):
        """Differences need more digits than a model of 16 bits: they have the precision of most contributors."""
        contributions = {"a": model(torch.float16, 7), "b": model(torch.float32), "c": model(torch.float32, 3)}
        reference = model(torch.bfloat16)
        for names in ("bc", "abc", "ab"):
            sent = {name: contributions[name] for name in names}
            assert aggregate(sent, out, params_type="DIFF", reference=reference)["w"].dtype is torch.float32
        wrong = {**contributions, "d": {"w": torch.ones(3, dtype=torch.float64)}, "e": model(torch.int64)}
        result = Aggregation(params_type="DIFF", on_mismatch="skip").run(wrong, out, reference=reference)
        assert set(result.report.skipped) == {"d", "e"}
        assert result.tensors["w"].dtype is torch.float32

    @pytest.mark.parametrize(
        ("sent", "expected"),
        [
            ([torch.float16, torch.float32], torch.float32),
            ([torch.float16, torch.bfloat16], torch.float32),
            ([torch.float64, torch.bfloat16, torch.bfloat16], torch.bfloat16),
            ([torch.float16, torch.bfloat16, torch.int64, torch.int64], torch.float32),
            ([torch.int64, torch.float16], torch.float16),
            ([torch.complex64, torch.float16], torch.float16),
            ([torch.float8_e8m0fnu, torch.int8], torch.int8),
            ([torch.float8_e8m0fnu, torch.float8_e8m0fnu, torch.int8, torch.int8], torch.int8),
        ],
    )
    def test_without_a_reference(self, out, sent, expected):
        """Most contributors decide, where real floating-point types count as one; no tie is decided by name."""
        for order in (sent, sent[::-1]):
            contributions = {f"site-{number}": {"w": values(dtype)} for number, dtype in enumerate(order)}
            assert aggregate(contributions, out, on_mismatch="skip")["w"].dtype is expected

    def test_a_tensor_of_one_contributor_only(self, out):
        """A dtype without arithmetic is not in the result because one contributor made the tensor up."""
        contributions = {name: model(torch.float32) for name in "bc"}
        contributions["a"] = {**model(torch.float32, 9), "made up": torch.ones(2).to(torch.float8_e8m0fnu)}
        result = Aggregation(on_mismatch="skip").run(contributions, out)
        assert set(result.report.skipped) == {"a"}
        assert "'made up' is torch.float8_e8m0fnu" in str(result.report.skipped["a"])

    @pytest.mark.parametrize("reference", [None, {"w": torch.ones(2).to(torch.complex128)}])
    def test_most_contributors_cannot_be_aggregated(self, out, reference):
        """A dtype without arithmetic ends the round if most contributors have it; the error has a remedy."""
        contributions = {name: {"w": torch.ones(2).to(torch.complex128)} for name in "abc"}
        contributions["d"] = {"w": torch.ones(2)}
        with pytest.raises(AggregationDtypeError, match=r"'w' is torch.complex128.*exclude it"):
            aggregate(contributions, out, on_mismatch="skip", reference=reference)


def test_an_incomplete_contribution_does_not_win_a_tie(out):
    """If a rule requires every tensor, the contribution with the most names wins a tie, not the first by name."""
    contributions = {"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2), "v": torch.ones(1)}}
    result = Aggregation("median", on_mismatch="skip").run(contributions, out)
    assert set(result.report.skipped) == {"a"}


def test_a_contribution_that_does_not_match_has_no_vote_on_names(out):
    """A rule requires the names of the contributions that otherwise match."""
    contributions = {name: {"w": torch.ones(3)} for name in "ab"}
    contributions |= {name: {"w": torch.ones(2), "v": torch.ones(1)} for name in "cd"}
    reference = {"w": torch.zeros(2), "v": torch.zeros(1)}
    result = Aggregation("median", on_mismatch="skip").run(contributions, out, reference=reference)
    assert result.report.contributors == ("c", "d")
