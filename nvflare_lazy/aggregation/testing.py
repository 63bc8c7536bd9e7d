# SPDX-License-Identifier: Apache-2.0
"""`RuleContract`: the tests that every aggregation rule must pass, for the package's rules and for your own.

pytest collects a subclass that sets the rule; nothing else of pytest is needed.

    class TestMyRule(RuleContract):
        rule = MyRule()
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nvflare_lazy.aggregation.api import Aggregation
from nvflare_lazy.aggregation.report import METADATA_KEY
from nvflare_lazy.aggregation.rules import Rule, rule_names, to_rule
from nvflare_lazy.errors import AggregationDtypeError, NothingToAggregateError, TooFewContributorsError
from nvflare_lazy.formats import open as open_checkpoint
from nvflare_lazy.formats import save
from nvflare_lazy.tensors.byte_source import FailedSource
from nvflare_lazy.tensors.lazy_tensor import LazyTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from nvflare_lazy.aggregation._round_execution import AggregationResult

Tensors = dict[str, torch.Tensor]
_ALL_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


class RuleContract:
    """The tests of a rule.

    Attributes:
        rule: The rule.
        contributors: Number of contributors in the tests; more than the rule requires.
        is_average: Whether each element of a result is between the least and the greatest value that was sent, or zero.
    """

    rule: ClassVar[Rule]
    contributors: ClassVar[int] = 9
    is_average: ClassVar[bool] = True

    def test_same_bits_whatever_the_arrival_tiles_and_threads(self, tmp_path: Path) -> None:
        """The result has the same bits for any order of arrival, tile size, number of threads, and lazy inputs."""
        contributions = self._contributions()
        expected = _bits(self._aggregate(contributions, tmp_path / "out.safetensors", threads=1))
        names = sorted(contributions)
        for number, (tile, threads) in enumerate([("4KiB", 1), ("4KiB", 8), ("6000B", 3), ("1MiB", 2), (1, 5)]):
            names = [*names[3:], *reversed(names[:3])]
            arrived: dict[str, Any] = {name: contributions[name] for name in names}
            if number % 2:
                arrived = {
                    name: open_checkpoint(save(tensors, tmp_path / f"{name}.safetensors"))
                    for name, tensors in arrived.items()
                }
            result = self._aggregate(arrived, tmp_path / f"{number}.safetensors", tile_size=tile, threads=threads)
            assert _bits(result) == expected, f"other bits with tiles of {tile} and {threads} threads"

    def test_types_and_shapes_stay(self, tmp_path: Path) -> None:
        """The result has the dtypes and shapes of the contributions, for every dtype, and is finite."""
        contributions = self._contributions(
            {"scalar": ((), torch.float32)} | {str(dtype): ((2, 3), dtype) for dtype in _ALL_DTYPES}
        )
        result = self._aggregate(contributions, tmp_path / "out.safetensors").tensors
        sent = next(iter(contributions.values()))
        assert {key: (value.dtype, value.shape) for key, value in result.items()} == {
            key: (value.dtype, value.shape) for key, value in sent.items()
        }
        assert all(torch.isfinite(value.double()).all() for value in result.values())

    def test_complex_numbers(self, tmp_path: Path) -> None:
        """Complex tensors are aggregated, or rejected by a rule that orders elements."""
        contributions = self._contributions({"c": ((5,), torch.complex64)})

        def aggregate() -> AggregationResult:
            return self._aggregate(contributions, tmp_path / "out.safetensors")

        if self.rule.uses_order:
            assert "'c'" in _raised(AggregationDtypeError, aggregate)
        else:
            assert aggregate().tensors["c"].dtype is torch.complex64

    def test_between_least_and_greatest(self, tmp_path: Path) -> None:
        """Each element of an average is within the range of the values sent and zero, the global model's value."""
        contributions = self._contributions()
        result = self._aggregate(contributions, tmp_path / "out.safetensors").tensors
        for key, value in result.items():
            sent = torch.stack([tensors[key].double() for tensors in contributions.values()])
            sent = torch.cat([sent, torch.zeros_like(sent[:1])])
            is_between = (sent.amin(0) <= value.double()) & (value.double() <= sent.amax(0))
            assert is_between.all() or not self.is_average

    def test_failing_contribution_is_skipped(self, tmp_path: Path) -> None:
        """The result equals the others' result, and the report names the skipped contribution with the reason."""
        contributions = self._contributions()
        broken = sorted(contributions)[4]
        others = {name: tensors for name, tensors in contributions.items() if name != broken}
        # The dtype that is read last: everything read before must be removed from the result.
        last = contributions[broken]["narrow"]
        source = FailedSource(last.numel() * last.itemsize, OSError("the disk is on fire"))
        contributions[broken] = {**contributions[broken], "narrow": LazyTensor(source, last.dtype, last.shape)}
        result = self._aggregate(contributions, tmp_path / "out.safetensors")
        assert _bits(result) == _bits(self._aggregate(others, tmp_path / "expected.safetensors"))
        assert result.report.contributors == tuple(sorted(others))
        assert str(result.report.skipped[broken]) == "the disk is on fire"

    def test_too_few_contributors(self, tmp_path: Path) -> None:
        """With too few contributors, the error has the required number, and no file is written."""
        contributions = dict(sorted(self._contributions().items())[: self.rule.min_contributors])
        fewer = dict([*contributions.items()][1:])

        def aggregate() -> AggregationResult:
            return self._aggregate(fewer, tmp_path / "out.safetensors")

        if fewer:
            message = _raised(TooFewContributorsError, aggregate)
            assert f"requires at least {self.rule.min_contributors} contributors" in message
        else:
            _raised(NothingToAggregateError, aggregate)
        assert not any(tmp_path.iterdir())
        self._aggregate(contributions, tmp_path / "out.safetensors")

    def test_says_how_the_result_was_made(self, tmp_path: Path) -> None:
        """The report consists of plain values, the file's metadata agrees, and the description recreates the rule."""
        result = self._aggregate(self._contributions(), tmp_path / "out.safetensors")
        written = json.loads(result.tensors.metadata[METADATA_KEY])
        assert written["rule"] == self.rule.describe()
        assert written["contributors"] == [f"site-{number}" for number in range(self.contributors)]
        reported = json.loads(json.dumps(result.report.as_dict()))
        assert written == {key: reported[key] for key in written}
        if self.rule.name in rule_names():
            assert to_rule(self.rule.describe()) == self.rule

    def test_little_memory(self, tmp_path: Path) -> None:
        """A small budget leads to small tiles and the same result."""
        contributions = self._contributions()
        expected = _bits(self._aggregate(contributions, tmp_path / "out.safetensors"))
        result = self._aggregate(contributions, tmp_path / "small.safetensors", memory_budget="512KiB", threads=4)
        assert _bits(result) == expected

    def test_whole_updates(self, tmp_path: Path) -> None:
        """A contribution without a tensor is skipped if the rule requires all tensors, else ignored for that one."""
        contributions = self._contributions()
        lacking = sorted(contributions)[0]
        del contributions[lacking]["small"]
        result = self._aggregate(contributions, tmp_path / "out.safetensors", on_mismatch="skip")
        assert (lacking in result.report.skipped) == self.rule.requires_all_tensors
        assert ("small" in result.report.partial) == (not self.rule.requires_all_tensors)

    def _contributions(
        self, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None
    ) -> dict[str, Tensors]:
        if tensors is None:
            # Tensors that end in the middle of a block, one of several tiles, and one without elements.
            tensors = {
                "odd": ((700,), torch.float32),
                "small": ((3, 5), torch.float32),
                "empty": ((0,), torch.float32),
                "narrow": ((9, 1000), torch.bfloat16),
            }
        generator = torch.Generator().manual_seed(0)
        return {
            f"site-{number}": {key: _random(shape, dtype, generator) for key, (shape, dtype) in tensors.items()}
            for number in range(self.contributors)
        }

    def _aggregate(
        self, contributions: Mapping[str, Mapping[str, Any]], out: Path, **settings: Any
    ) -> AggregationResult:
        model = {key: torch.zeros_like(value) for key, value in self._largest(contributions).items()}
        weights = {name: float(name[-1]) + 1 for name in contributions}
        aggregation = Aggregation(self.rule, fsync=False, **settings)
        return aggregation.run(contributions, out, weights=weights, reference=model)

    @staticmethod
    def _largest(contributions: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        return max(contributions.values(), key=len, default={})


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_complex:
        return torch.complex(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


def _bits(result: AggregationResult) -> dict[str, bytes]:
    return {key: bytes(value.source.read()) for key, value in result.tensors.items()}


def _raised(error: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except error as raised:
        return str(raised)
    raise AssertionError(f"{error.__name__} was not raised")
