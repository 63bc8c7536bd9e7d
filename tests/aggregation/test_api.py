# SPDX-License-Identifier: Apache-2.0
"""Which contributions count: names, shapes, dtypes, weights, values, failures, and the messages about them."""

from __future__ import annotations

import json
import math
import resource
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nvflare_lazy
from nvflare_lazy.aggregation import METADATA_KEY, Aggregation, Progress, aggregate
from nvflare_lazy.aggregation._engine.tile_io import OutputVector
from nvflare_lazy.errors import (
    AggregationCancelledError,
    AggregationDtypeError,
    DiskFullError,
    MemoryBudgetError,
    MismatchError,
    NonFiniteError,
    NothingToAggregateError,
    SourceReleasedError,
    TooFewContributorsError,
    UnsupportedDtypeError,
    UnsupportedTensorError,
    WeightError,
)
from nvflare_lazy.formats.atomic_file import AtomicFile
from nvflare_lazy.tensors.byte_source import FailedSource
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.tensors.tensor_file import FileSource, TensorFile
from tests.aggregation.contributions import bits, flat, matrix, on_disk, random_round


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out" / "mean.safetensors"


@pytest.fixture(autouse=True)
def _folder(out):
    """Nothing may be left in it but results."""
    out.parent.mkdir()


def ones(**tensors):
    return {name: torch.full(shape, value) for name, (shape, value) in tensors.items()}


def left_behind(out):
    return sorted(path.name for path in out.parent.iterdir())


class TestOrder:
    """Contributors count in the order of their names."""

    def test_bits_do_not_depend_on_the_order_of_arrival(self, out):
        """Float32 sums depend on their order; these do not."""
        contributions = random_round(5, [((1000,), torch.float32)], 3)
        expected = None
        for first in contributions:
            arrived = {first: contributions[first], **contributions}
            result = bits(aggregate(arrived, out))
            assert result == (expected or result)
            expected = result


class TestNames:
    """Which tensors take part."""

    def test_missing_tensors_renormalize_the_weights(self, out):
        """The mean of a tensor that some contributions lack is made from the others, and the report names them."""
        contributions = {
            "a": ones(both=((2,), 1.0), some=((2,), 10.0)),
            "b": ones(both=((2,), 4.0)),
            "c": ones(both=((2,), 7.0), some=((2,), 40.0)),
        }
        weights = {"a": 1, "b": 2, "c": 3}
        result = Aggregation().run(contributions, out, weights=weights)
        assert result.tensors["both"].tolist() == [5, 5]
        assert result.tensors["some"].tolist() == [32.5, 32.5]
        assert result.report.partial == {"some": ("a", "c")}
        assert result.report.weights_of("some") == {"a": 0.25, "c": 0.75}
        assert result.report.weights_of("both") == {"a": 1 / 6, "b": 2 / 6, "c": 3 / 6}

    def test_exclude(self, out):
        """What the expression finds in a name is in no result; it need not even be a tensor."""
        contributions = {name: {**ones(w=((2,), 1.0), bn_mean=((2,), 1.0)), "bn_note": "hi"} for name in "ab"}
        result = Aggregation(exclude="^bn_").run(contributions, out)
        assert [*result.tensors] == ["w"]
        assert result.report.excluded == ("bn_mean", "bn_note")

    def test_global_model_decides(self, out):
        """A tensor that the global model does not have is surplus; one that no contribution has is not missing."""
        contributions = {"a": ones(w=((2,), 1.0)), "b": ones(w=((2,), 3.0), backdoor=((2,), 1.0))}
        model = ones(w=((2,), 0.0), frozen=((2,), 0.0))
        with pytest.raises(MismatchError, match="'b' does not match the global model: unexpected tensor 'backdoor'"):
            Aggregation().run(contributions, out, reference=model)
        result = Aggregation(on_mismatch="skip").run(contributions, out, reference=model)
        assert result.tensors["w"].tolist() == [1, 1]
        assert [*result.report.skipped] == ["b"]

    def test_robust_rules_want_whole_updates(self, out):
        """A contribution with fewer or more tensors than most others does not take part in a median."""
        contributions = {name: ones(w=((2,), float(index)), v=((2,), 0.0)) for index, name in enumerate("abcd")}
        del contributions["a"]["v"]
        contributions["d"]["extra"] = torch.ones(1)
        with pytest.raises(MismatchError, match="'a' does not match the other contributions: no tensor 'v'"):
            Aggregation("median").run(contributions, out)
        result = Aggregation("median", on_mismatch="skip").run(contributions, out)
        assert result.report.contributors == ("b", "c")
        assert result.tensors["w"].tolist() == [1.5, 1.5]


class TestShapesAndTypes:
    """What contributors must agree on."""

    CASES = (
        (torch.zeros(2, 1), MismatchError, r"'b' does not match .*: 'w' has shape \[2, 1\], expected \[2\]"),
        (torch.zeros(2).int(), MismatchError, "'b' does not match .*: 'w' is torch.int32, expected torch.float32"),
        (torch.zeros(2).to_sparse(), UnsupportedTensorError, "'w' of 'b': a sparse"),
        ([1.0, 2.0], UnsupportedTensorError, "'w' of 'b': a list is neither a tensor nor an array"),
        (
            np.array(["x", "y"]),
            UnsupportedDtypeError,
            "'w' of 'b': tensor files do not support <U1 arrays; .*; or exclude it",
        ),
    )

    @pytest.mark.parametrize(("wrong", "error", "message"), CASES)
    def test_error_or_left_out(self, out, wrong, error, message):
        """A contribution that differs from the majority is named in an error, or skipped with the same error."""
        contributions = {name: {"w": torch.ones(2)} for name in "acd"}
        contributions["b"] = {"w": wrong}
        with pytest.raises(error, match=message):
            Aggregation().run(contributions, out)
        assert left_behind(out) == []
        result = Aggregation(on_mismatch="skip").run(contributions, out)
        assert result.report.contributors == ("a", "c", "d")
        assert isinstance(result.report.skipped["b"], error)

    def test_a_disagreement_is_one_kind_of_error(self, out):
        """A caller that handles mismatches need not list their kinds."""
        with pytest.raises(MismatchError):
            aggregate({"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(3)}}, out)

    def test_majority_is_right(self, out):
        """Also if the first by name is the one that differs."""
        contributions = {name: {"w": torch.ones(2)} for name in "bcd"} | {"a": {"w": torch.ones(3)}}
        result = Aggregation(on_mismatch="skip").run(contributions, out)
        assert [*result.report.skipped] == ["a"]

    def test_types_without_arithmetic(self, out):
        """A type that has no mean raises an error, which advises to exclude it."""
        contributions = {name: {"scale": torch.ones(2).to(torch.float8_e8m0fnu)} for name in "ab"}
        with pytest.raises(AggregationDtypeError, match=r"'scale' is torch.float8_e8m0fnu.*exclude it"):
            aggregate(contributions, out)

    @pytest.mark.parametrize("dtype", [">f4", "<f8", ">i2", "bool", "complex64", "float16"])
    def test_arrays_are_as_good_as_tensors(self, out, dtype):
        """NumPy arrays of any byte order and layout, scalars, and lazy arrays."""
        values = np.arange(6).reshape(2, 3).astype(dtype)
        native = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
        source = LazyTensor.from_tensor(torch.from_numpy(native.copy())).source
        contributions = {
            "a": {"w": values, "s": np.float32(1)},
            "b": {"w": np.asfortranarray(values), "s": np.float32(3)},
            "c": {"w": LazyArray(source, native.dtype, native.shape), "s": torch.tensor(2.0)},
        }
        result = aggregate(contributions, out)
        assert np.array_equal(result["w"].numpy(), native)
        assert result["s"].item() == 2

    def test_views(self, out):
        """Transposed, strided and expanded tensors are read as what they show."""
        base = torch.arange(12.0).view(3, 4)
        views = {"t": base.T, "s": base[:, ::2], "e": base[:1].expand(3, 4)}
        result = aggregate({"a": views, "b": {key: value + 2 for key, value in views.items()}}, out)
        for key, value in views.items():
            assert torch.equal(result[key].materialize(), value + 1)


class TestWeights:
    """What a contributor counts."""

    @pytest.mark.parametrize("weight", [-1, math.nan, math.inf, -math.inf])
    def test_impossible_weights(self, out, weight):
        """They are named, with the contributor."""
        with pytest.raises(WeightError, match="the weight of 'b' must be"):
            aggregate({"a": ones(w=((1,), 1.0)), "b": ones(w=((1,), 1.0))}, out, weights={"a": 1, "b": weight})

    def test_missing_weight(self, out):
        """Weights are for all or for none; those of contributors that are not there do not matter."""
        with pytest.raises(WeightError, match="missing weights for 'b'"):
            aggregate({"a": ones(w=((1,), 1.0)), "b": ones(w=((1,), 1.0))}, out, weights={"a": 1, "z": 1})

    def test_zero_weight_does_not_take_part(self, out):
        """It is not even read, so it may be broken, in a median as in a mean."""
        broken = LazyTensor(FailedSource(8, OSError("gone")), torch.float32, (2,))
        contributions = {"a": ones(w=((2,), 1.0)), "b": {"w": broken}, "c": ones(w=((2,), 3.0))}
        for rule in ("mean", "median"):
            result = Aggregation(rule).run(contributions, out, weights={"a": 1, "b": 0, "c": 1})
            assert result.tensors["w"].tolist() == [2, 2]
            assert isinstance(result.report.skipped["b"], WeightError)

    def test_all_zero(self, out):
        """Such tensors have no mean."""
        with pytest.raises(WeightError, match="weights of all contributors are zero: 'a', 'b'"):
            aggregate({"a": ones(w=((1,), 1.0)), "b": ones(w=((1,), 1.0))}, out, weights={"a": 0, "b": 0})

    @given(st.floats(1e-300, 1e300))
    def test_scale_does_not_matter(self, tmp_path_factory, scale):
        """Only ratios count, however small or large the numbers are."""
        out = tmp_path_factory.getbasetemp() / "scaled.safetensors"
        contributions = {"a": ones(w=((3,), 1.0)), "b": ones(w=((3,), 4.0))}
        result = aggregate(contributions, out, weights={"a": 2 * scale, "b": scale}, fsync=False)
        assert result["w"].tolist() == [2, 2, 2]


class TestNothing:
    """Empty rounds are errors with a name."""

    def test_no_contribution(self, out):
        """No contribution arrived."""
        with pytest.raises(NothingToAggregateError, match="no contributions to aggregate"):
            aggregate({}, out)

    @pytest.mark.parametrize("tensors", [{}, ones(w=((1,), 1.0))])
    def test_no_tensor(self, out, tensors):
        """Nothing was sent, or everything was excluded."""
        with pytest.raises(NothingToAggregateError, match="no tensors to aggregate"):
            aggregate({"a": tensors}, out, exclude="w")

    def test_only_empty_tensors(self, out):
        """These are tensors all the same."""
        assert aggregate({"a": {"e": torch.empty(0, 3)}, "b": {"e": torch.empty(0, 3)}}, out)["e"].shape == (0, 3)

    def test_everybody_fails(self, out):
        """The error has the reason for each skipped contribution."""
        broken = LazyTensor(FailedSource(8, OSError("the line broke")), torch.float32, (2,))
        with pytest.raises(NothingToAggregateError, match="skipped 'a': the line broke; skipped 'b': the"):
            aggregate({"a": {"w": broken}, "b": {"w": broken}}, out)
        assert left_behind(out) == []

    def test_min_contributors(self, out):
        """The caller may want more than the rule does."""
        broken = LazyTensor(FailedSource(8, OSError("the line broke")), torch.float32, (2,))
        with pytest.raises(TooFewContributorsError, match="at least 2 contributors, got 1; skipped 'a': the line"):
            Aggregation(min_contributors=2).run({"a": {"w": broken}, "b": ones(w=((2,), 1.0))}, out)


class TestNonFinite:
    """NaN and infinity in a contribution."""

    def contributions(self, value, dtype=torch.float32):
        poisoned = torch.ones(3000, dtype=dtype)
        poisoned[1500] = value
        return {name: {"w": torch.ones(3000, dtype=dtype), "n": torch.tensor([5])} for name in "acd"} | {
            "b": {"w": poisoned, "n": torch.tensor([5])}
        }

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2])
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_policies(self, out, value, dtype):
        """Keep and compute with it, leave the contribution out, or raise and say where it is."""
        contributions = self.contributions(value, dtype)
        kept = aggregate(contributions, out, tile_size="4KiB")["w"].float()
        assert torch.isfinite(kept).sum() == 2999
        result = Aggregation(on_non_finite="skip").run(contributions, out)
        assert torch.equal(result.tensors["w"].float(), torch.ones(3000))
        assert isinstance(result.report.skipped["b"], NonFiniteError)
        with pytest.raises(NonFiniteError, match=r"'w' of 'b' contains (nan|inf|-inf)"):
            aggregate(contributions, out, on_non_finite="error")

    def test_large_values_are_finite(self, out):
        """Numbers whose sum overflows are not a reason to skip a contribution."""
        contributions = {name: {"w": torch.full((3000,), 3e38)} for name in "ab"}
        result = Aggregation(on_non_finite="skip").run(contributions, out)
        assert result.report.skipped == {}
        assert result.tensors["w"][0].item() == pytest.approx(3e38)

    def test_median_takes_nan_for_infinity(self, out):
        """So that it is outvoted, and not contagious."""
        contributions = self.contributions(math.nan)
        assert torch.equal(aggregate(contributions, out, "median")["w"].materialize(), torch.ones(3000))


class TestFailures:
    """A contribution that cannot be read costs itself and nothing else."""

    def test_truncated_file(self, out, tmp_path):
        """A file cut short after it was opened, in the middle of its last tensor."""
        contributions = on_disk(random_round(4, [((50_000,), torch.float32)] * 3, 0), tmp_path / "in")
        expected = bits(aggregate({name: contributions[name] for name in contributions if name != "site-2"}, out))
        with (tmp_path / "in" / "site-2.safetensors").open("r+b") as file:
            file.truncate(450_000)
        result = Aggregation(tile_size="16KiB").run(contributions, out)
        assert bits(result.tensors) == expected
        assert "site-2" in str(result.report.skipped["site-2"])

    def test_released_scratch(self, out, tmp_path):
        """Scratch that was released too early."""
        contributions = on_disk(random_round(3, [((50,), torch.float32)], 0), tmp_path / "in")
        contributions["site-1"].cleanup()
        result = Aggregation().run(contributions, out)
        assert isinstance(result.report.skipped["site-1"], SourceReleasedError)

    def test_mapping_that_raises(self, out):
        """A contribution that cannot even be listed."""

        class Broken(dict):
            def items(self):
                raise OSError("no such result")

        result = Aggregation().run({"a": ones(w=((1,), 1.0)), "b": Broken()}, out)
        assert str(result.report.skipped["b"]) == "no such result"

    def test_several_fail_one_after_the_other(self, out):
        """Each attempt finds one more; the last is without all of them."""
        contributions = random_round(7, [((3000,), torch.float32)] * 3, 0)
        for number, key in ((1, "t0"), (3, "t1"), (5, "t2")):
            bad = contributions[f"site-{number}"]
            bad[key] = LazyTensor(FailedSource(12000, OSError(f"bad {key}")), torch.float32, (3000,))
        result = Aggregation(tile_size="4KiB").run(contributions, out)
        assert {name: str(error) for name, error in result.report.skipped.items()} == {
            "site-1": "bad t0",
            "site-3": "bad t1",
            "site-5": "bad t2",
        }
        good = {name: tensors for name, tensors in contributions.items() if name[-1] in "0246"}
        np.testing.assert_allclose(flat(result.tensors), matrix(good).mean(axis=0), rtol=1e-6)

    def test_rule_that_has_too_few_left(self, out):
        """Failures may leave a rule with fewer than it needs."""
        contributions = random_round(5, [((10,), torch.float32)], 0)
        contributions["site-0"]["t0"] = LazyTensor(FailedSource(40, OSError("bad")), torch.float32, (10,))
        with pytest.raises(TooFewContributorsError, match="at least 5 contributors, got 4; skipped 'site-0': bad"):
            Aggregation({"name": "krum", "num_byzantine": 1}).run(contributions, out)

    def test_broken_global_model_is_nobodys_fault(self, out):
        """The error is the model's error, and no contributor is blamed."""
        contributions = random_round(3, [((10,), torch.float32)], 0)
        model = {"t0": LazyTensor(FailedSource(40, OSError("model is gone")), torch.float32, (10,))}
        with pytest.raises(OSError, match="model is gone"):
            Aggregation({"name": "clipped_mean", "clip_norm": 1}).run(contributions, out, reference=model)

    def test_disk_full(self, out):
        """No contributor is blamed, and nothing appears."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with pytest.raises(DiskFullError):
                aggregate({"a": ones(w=((50_000,), 1.0))}, out)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert left_behind(out) == []

    def test_disk_breaks(self, out, monkeypatch):
        """An error in writing is not a contributor's error."""

        def broken(self, start, buffer):
            raise OSError("the disk broke")

        contributions = {"a": ones(w=((50_000,), 1.0)), "b": ones(w=((50_000,), 1.0))}
        with monkeypatch.context() as patch:
            patch.setattr(OutputVector, "write", broken)
            with pytest.raises(OSError, match="the disk broke"):
                aggregate(contributions, out)
        assert left_behind(out) == []


class TestRelease:
    """Contributions are released as early as possible, each once."""

    def test_left_out_ones_first(self, out):
        """A skipped contribution is released at once, the others when the result exists."""
        contributions = {name: ones(w=((2,), 1.0)) for name in "abcd"}
        contributions["b"] = ones(w=((3,), 1.0))
        contributions["c"] = {"w": LazyTensor(FailedSource(8, OSError("bad")), torch.float32, (2,))}
        seen = []

        def release(name):
            seen.append((name, out.exists()))

        aggregate(contributions, out, on_mismatch="skip", on_contribution_done=release)
        assert seen == [("b", False), ("c", False), ("a", True), ("d", True)]

    def test_may_close_the_files(self, out, tmp_path):
        """The result no longer needs them."""
        contributions = on_disk(random_round(3, [((50,), torch.float32)], 0), tmp_path / "in")
        result = aggregate(contributions, out, on_contribution_done=lambda name: contributions[name].cleanup())
        assert np.isfinite(flat(result)).all()

    def test_the_result_releases_its_owner(self, out):
        """`cleanup()` releases what the result owns."""

        class Lease:
            released = False

            def release(self):
                self.released = True

        lease = Lease()
        result = aggregate({"a": ones(w=((2,), 1.0))}, out)
        result.own(lease)
        assert not lease.released
        result.cleanup()
        assert lease.released


class TestProgressAndCancel:
    """The caller sees how far it is, and can call it off."""

    def test_progress(self, out):
        """In the caller's thread, by stages, up to the total."""
        seen = []

        def progress(report):
            seen.append(report)
            assert threading.current_thread() is threading.main_thread()

        contributions = random_round(5, [((100_000,), torch.float32), ((7,), torch.int64)], 0)
        aggregate(contributions, out, "krum", progress=progress)
        assert list(dict.fromkeys(report.stage for report in seen)) == ["pairwise distances", "krum"]
        floats, everything = 5 * 400_000, 5 * 400_056
        assert [report for report in seen if report.done == report.total] == [
            Progress("pairwise distances", floats, floats),
            Progress("krum", everything, everything),
        ]

    @pytest.mark.parametrize("rule", ["mean", "krum"])
    def test_cancel(self, out, rule):
        """An event stops it; no file is left, and the contributions are unchanged."""
        contributions = random_round(5, [((300_000,), torch.float32)], 0)
        event, threads = threading.Event(), threading.active_count()
        calls = []

        def progress(report):
            calls.append(report)
            event.set()

        with pytest.raises(AggregationCancelledError):
            aggregate(contributions, out, rule, should_cancel=event.is_set, progress=progress)
        assert left_behind(out) == []
        assert threading.active_count() == threads
        assert len(aggregate(contributions, out, rule)) == 1

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_callback_that_raises(self, out, error):
        """Any exception of a callback ends it cleanly."""

        def progress(report):
            raise error

        threads = threading.active_count()
        with pytest.raises(error):
            aggregate(random_round(3, [((300_000,), torch.float32)], 0), out, progress=progress)
        assert left_behind(out) == []
        assert threading.active_count() == threads

    def test_threads_of_torch_are_as_before(self, out):
        """Torch computes on one thread in each of our threads, and elsewhere the number of its threads is unchanged."""
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            aggregate(random_round(3, [((3000,), torch.float32)], 0), out, threads=4)
            elsewhere = []
            for _ in range(2):
                thread = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
                thread.start()
                thread.join()
            assert [torch.get_num_threads(), *elsewhere] == [3, 3, 3]
        finally:
            torch.set_num_threads(before)


class TestProvenance:
    """The result has a record of its origin."""

    def test_metadata_of_the_file(self, out):
        """Rule, type, the weight of each contributor, the reason for each skipped one, and the caller's own text."""
        contributions = {"a": ones(w=((2,), 1.0)), "b": ones(w=((2,), 2.0)), "c": ones(w=((3,), 2.0))}
        aggregation = Aggregation(params_type="DIFF", on_mismatch="skip")
        aggregation.run(contributions, out, weights={"a": 1, "b": 3, "c": 1}, metadata={"round": "7"})
        metadata = nvflare_lazy.open(out).metadata
        assert (metadata["round"], metadata["format"]) == ("7", "pt")
        said = json.loads(metadata[METADATA_KEY])
        assert said["rule"] == {"name": "mean"}
        assert said["params_type"] == "DIFF"
        assert said["weights"] == {"a": 0.25, "b": 0.75}
        assert said["skipped"]["c"].startswith("MismatchError: contribution 'c' does not match")

    def test_report_as_callback(self, out):
        """`aggregate` returns the model; who wants to know more, asks."""
        seen = []
        result = aggregate({"a": ones(w=((2,), 1.0)), "b": ones(w=((2,), 2.0))}, out, on_report=seen.append)
        [report] = seen
        assert (report.tensors, report.nbytes) == (len(result), result.nbytes)
        assert report.contributors == ("a", "b")

    def test_infinite_scores_are_still_json(self, out):
        """Strict readers of JSON know no infinity."""
        contributions = {f"site-{i}": ones(w=((2,), float("inf") if i == 3 else 1.0)) for i in range(5)}
        aggregate(contributions, out, "krum")

        def refuse(constant):
            raise AssertionError(constant)

        said = json.loads(nvflare_lazy.open(out).metadata[METADATA_KEY], parse_constant=refuse)
        assert said["decisions"]["scores"]["site-3"] == "inf"


class TestOutput:
    """Where the result goes."""

    def test_directory(self, out):
        """In a directory it gets the usual name."""
        aggregate({"a": ones(w=((2,), 1.0))}, out.parent)
        assert left_behind(out) == ["model.safetensors"]

    def test_shards(self, out):
        """A result may be split, and opens as one."""
        contributions = random_round(3, [((1000,), torch.float32)] * 6, 0)
        result = aggregate(contributions, out, max_shard_size="9KB")
        assert len(left_behind(out)) == 4
        assert len(result) == 6
        assert bits(result) == bits(aggregate(contributions, out.with_name("whole.safetensors")))

    def test_over_a_contribution(self, out):
        """The result may replace a file that is being read."""
        first = aggregate({"a": ones(w=((200_000,), 1.0))}, out)
        second = aggregate({"old": first, "new": ones(w=((200_000,), 3.0))}, out)
        assert second["w"][:2].tolist() == [2, 2]

    def test_failure_keeps_the_file_before(self, out):
        """The old file stays until the new one is complete."""
        aggregate({"a": ones(w=((2,), 1.0))}, out)
        with pytest.raises(NonFiniteError):
            aggregate({"a": ones(w=((2,), math.nan))}, out, on_non_finite="error")
        assert nvflare_lazy.open(out)["w"].tolist() == [1, 1]

    @pytest.mark.parametrize("names", [["w"], ["a", "w"]])
    def test_writes_end_at_multiples_of_tiles(self, names, out, monkeypatch):
        """All but the last: in the file, not in the tensor, which starts after the header."""
        writes, write_at = [], AtomicFile.write_at

        def recorded(self, data, offset):
            writes.append((offset, offset + len(data)))
            write_at(self, data, offset)

        monkeypatch.setattr(AtomicFile, "write_at", recorded)
        values = {name: torch.arange(400_000 if name == "w" else 1_001, dtype=torch.float32) for name in names}
        aggregate({"a": values, "b": values}, out, threads=1, memory_budget="1MiB")
        found = nvflare_lazy.open(out)
        assert all(torch.equal(found[name].materialize(), values[name]) for name in names)
        ends = sorted(writes)[-1][1]
        tile = max(end - begin for begin, end in writes)
        assert ends > 4 * tile
        assert [end for _, end in sorted(writes)[len(names) : -1] if end % tile] == []


class TestSettings:
    """An invalid configuration raises an error when it is read."""

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"params_type": "DELTA"}, "params_type must be one of"),
            ({"on_mismatch": "ignore"}, "on_mismatch must be one of"),
            ({"on_non_finite": "zero"}, "on_non_finite must be one of"),
            ({"threads": 0}, "threads must be at least 1"),
            ({"min_contributors": 0}, "min_contributors must be at least 1"),
            ({"memory_budget": "lots"}, "invalid size"),
            ({"exclude": "("}, "exclude is not a valid regular expression"),
            ({"rule": "best"}, "unknown aggregation rule 'best'"),
        ],
    )
    def test_wrong(self, settings, message):
        """Each error names the expected type."""
        with pytest.raises(ValueError, match=message):
            Aggregation(**settings)

    def test_budget_too_small(self, out):
        """The error contains the required memory, which is enough."""
        contributions = random_round(64, [((10_000,), torch.float32)], 0)
        with pytest.raises(MemoryBudgetError, match=r"at least ([\d.]+ KiB) are needed") as caught:
            aggregate(contributions, out, "median", memory_budget="64KiB")
        needed = str(caught.value).partition("at least ")[2].partition(" are")[0]
        assert aggregate(contributions, out, "median", memory_budget=f"{float(needed.split()[0]) + 1}KiB")


def test_very_many_small_tensors(out, tmp_path):
    """They are read, computed and checked together: 20,000 of them with a handful of requests."""
    tensors = {f"layer.{index:05d}.bias": torch.full((3,), float(index)) for index in range(20_000)}
    files = {name: nvflare_lazy.save(tensors, tmp_path / f"{name}.safetensors") for name in "ab"}
    contributions = {name: nvflare_lazy.open(path) for name, path in files.items()}
    reads = []
    read = TensorFile.read_into

    def counting(self, buffer, offset):
        reads.append(len(buffer))
        read(self, buffer, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorFile, "read_into", counting)
        patch.setattr(FileSource, "read_into", counting)
        result = aggregate(contributions, out)
    assert len(reads) < 10
    assert {key: value.tolist() for key, value in list(result.items())[::997]} == {
        key: tensors[key].tolist() for key in list(result)[::997]
    }
