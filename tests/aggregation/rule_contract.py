# SPDX-License-Identifier: Apache-2.0
"""What every aggregation rule must hold: subclass `RuleContract` and say which rule.

class TestMyRule(RuleContract):
    rule = MyRule()
"""

from __future__ import annotations

import json
from typing import ClassVar

import numpy as np
import pytest
import torch

from nvflare_lazy.aggregation import METADATA_KEY, Aggregation, Rule, rule_names, to_rule
from nvflare_lazy.errors import NothingToAggregateError, TooFewContributorsError, UncomputableTensorError
from nvflare_lazy.tensors.byte_source import FailedSource
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from tests.aggregation.contributions import FLOATS, INTEGERS, bits, flat, matrix, on_disk, random_round

# Three tensors that end in the middle of a block, one that takes several tiles of 4 KiB, and an empty one.
TENSORS = [((700,), torch.float32), ((3, 5), torch.float32), ((9, 1000), torch.bfloat16), ((0,), torch.float32)]


class RuleContract:
    """The tests of a rule.

    Attributes:
        rule: The rule.
        contributors: How many take part in the tests; more than the rule needs.
        is_average: Whether a result lies between the least and the greatest value of each element.
        orders: Whether it goes by the order of elements, which complex numbers do not have.
    """

    rule: ClassVar[Rule]
    contributors: ClassVar[int] = 9
    is_average: ClassVar[bool] = True
    orders: ClassVar[bool] = False

    def aggregate(self, contributions, out, **settings):
        reference = {key: torch.zeros_like(value) for key, value in next(iter(contributions.values())).items()}
        weights = {name: float(name[-1]) + 1 for name in contributions}
        aggregation = Aggregation(self.rule, durable=False, **settings)
        return aggregation.run(contributions, out, weights=weights, reference=reference)

    def some(self, seed=0, tensors=TENSORS, **kwargs):
        return random_round(self.contributors, tensors, seed, **kwargs)

    def test_same_bits_whatever_the_arrival_tiles_and_threads(self, tmp_path):
        """Order of arrival, tile size, number of threads and laziness change no bit."""
        contributions = self.some()
        expected = bits(self.aggregate(contributions, tmp_path / "out.safetensors", threads=1).tensors)
        names = sorted(contributions)
        for number, (tile, threads) in enumerate([("4KiB", 1), ("4KiB", 8), ("6000B", 3), ("1MiB", 2), (1, 5)]):
            names = [*names[3:], *reversed(names[:3])]
            arrived = {name: contributions[name] for name in names}
            if number % 2:
                arrived = on_disk(arrived, tmp_path / "lazy")
            result = self.aggregate(arrived, tmp_path / f"{number}.safetensors", tile_size=tile, threads=threads)
            assert bits(result.tensors) == expected, (tile, threads)

    def test_types_and_shapes_stay(self, tmp_path):
        """The result has the types and shapes of the contributions, for every type there is."""
        dtypes = (*FLOATS, *INTEGERS, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
        contributions = self.some(tensors=[((2, 3), dtype) for dtype in dtypes] + [((), torch.float32)])
        result = self.aggregate(contributions, tmp_path / "out.safetensors").tensors
        sent = next(iter(contributions.values()))
        assert {key: (value.dtype, value.shape) for key, value in result.items()} == {
            key: (value.dtype, value.shape) for key, value in sent.items()
        }
        assert all(np.isfinite(flat(result)))

    def test_complex_numbers(self, tmp_path):
        """Complex tensors are aggregated, or refused by a rule that goes by order."""
        contributions = self.some(tensors=[((5,), torch.complex64)])
        if self.orders:
            with pytest.raises(UncomputableTensorError, match=r"t0.*exclude"):
                self.aggregate(contributions, tmp_path / "out.safetensors")
        else:
            result = self.aggregate(contributions, tmp_path / "out.safetensors").tensors
            assert result["t0"].dtype is torch.complex64

    def test_between_least_and_greatest(self, tmp_path):
        """No element of an average leaves the range of what was sent."""
        contributions = self.some()
        result = flat(self.aggregate(contributions, tmp_path / "out.safetensors").tensors)
        # Zero is where the global model is.
        sent = np.vstack([matrix(contributions), np.zeros(len(result))])
        is_between = (sent.min(axis=0) <= result) & (result <= sent.max(axis=0))
        assert is_between.all() or not self.is_average

    def test_who_fails_is_left_out_whole(self, tmp_path):
        """The result is that of the others, and says who was left out and why."""
        contributions = self.some()
        broken = sorted(contributions)[4]
        others = {name: tensors for name, tensors in contributions.items() if name != broken}
        failing = dict(contributions[broken])
        # The last that is read: all of it that came before must be gone.
        last = failing["t2"]
        source = FailedSource(last.numel() * last.itemsize, OSError("the disk is on fire"))
        failing["t2"] = LazyTensor(source, last.dtype, last.shape)
        result = self.aggregate({**contributions, broken: failing}, tmp_path / "out.safetensors")
        expected = self.aggregate(others, tmp_path / "expected.safetensors")
        assert bits(result.tensors) == bits(expected.tensors)
        assert result.report.contributors == tuple(sorted(others))
        assert str(result.report.left_out[broken]) == "the disk is on fire"

    def test_too_few_contributors(self, tmp_path):
        """With fewer than it needs, the error says how many are needed, and there is no file."""
        contributions = random_round(self.rule.needs, TENSORS, 0)
        fewer = {name: contributions[name] for name in [*contributions][1:]}
        error = TooFewContributorsError if fewer else NothingToAggregateError
        with pytest.raises(error, match=f"at least {self.rule.needs} are needed" if fewer else "no contribution"):
            Aggregation(self.rule).run(fewer, tmp_path / "out.safetensors")
        assert not any(tmp_path.iterdir())
        self.aggregate(contributions, tmp_path / "out.safetensors")

    def test_says_how_the_result_was_made(self, tmp_path):
        """The report is plain values, and the file's metadata has the same; the description makes the same rule."""
        result = self.aggregate(self.some(), tmp_path / "out.safetensors")
        written = json.loads(result.tensors.metadata[METADATA_KEY])
        assert written["rule"] == self.rule.describe()
        assert written["contributors"] == [f"site-{number}" for number in range(self.contributors)]
        said = json.loads(json.dumps(result.report.as_dict()))
        assert written == {key: said[key] for key in written}
        if self.rule.name in rule_names():
            assert to_rule(self.rule.describe()) == self.rule

    def test_little_memory(self, tmp_path):
        """A small budget makes small tiles, and no other result."""
        contributions = self.some()
        expected = self.aggregate(contributions, tmp_path / "out.safetensors")
        result = self.aggregate(contributions, tmp_path / "small.safetensors", memory_budget="512KiB", threads=4)
        assert bits(result.tensors) == bits(expected.tensors)

    def test_whole_updates(self, tmp_path):
        """A missing tensor leaves a contributor out if the rule needs whole updates, and only of that one if not."""
        contributions = self.some()
        lacking = sorted(contributions)[0]
        contributions[lacking] = {key: value for key, value in contributions[lacking].items() if key != "t1"}
        result = self.aggregate(contributions, tmp_path / "out.safetensors", on_mismatch="leave_out")
        assert (lacking in result.report.left_out) == self.rule.whole_updates
        assert ("t1" in result.report.partial) == (not self.rule.whole_updates)
