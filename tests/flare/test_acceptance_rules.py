# SPDX-License-Identifier: Apache-2.0
"""The rules of `docs/security.md`, row by row: an accepted value counts, and any other value costs its sender alone."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.intime_accumulate_model_aggregator import InTimeAccumulateWeightedAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_common.workflows.scaffold import Scaffold

from nvflare_lazy.errors import ResultMismatchError
from nvflare_lazy.flare import LazyAggregator, LazyCrossSiteEval, LazyScaffold, TensorOffload, job_context
from nvflare_lazy.flare.accepted_result import MAX_METRICS, MAX_STEPS, majority_kind
from nvflare_lazy.flare.tensor_names import TensorNames
from nvflare_lazy.flare.weights import zero_controls
from nvflare_lazy.tensors.byte_source import ByteSource, FailedSource
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from tests.documents.test_reference import rows, sections
from tests.flare.conftest import give, receive_from

NAN = float("nan")


class Round:
    """A round of `LazyAggregator` with two honest clients, whose models have the mean 2 and the accuracy 0.5."""

    def __init__(self, fl_ctx: Any, **arguments: Any) -> None:
        self.fl_ctx = fl_ctx
        give(fl_ctx, a=[0.0, 0.0], b=[0.0])
        self.aggregator = LazyAggregator(**arguments)
        self.aggregator.handle_event(EventType.START_RUN, fl_ctx)

    def outcome(self, *crafted: FLModel, first: bool = True) -> tuple[Any, Any]:
        """Return the first element of "a", and the mean accuracy, after crafted results among the honest ones."""
        honest = [sent(f"site-{number}", number) for number in (1, 3)]
        for result in [*crafted, *honest] if first else [*honest, *crafted]:
            with contextlib.suppress(ResultMismatchError):
                self.aggregator.accept_model(result)
        combined = self.aggregator.aggregate_model()
        assert list(combined.params) == ["a", "b"]
        return combined.params["a"].tolist()[0], (combined.metrics or {}).get("accuracy")


def sent(client: str, number: float, *, kind: Any = ParamsType.FULL, metrics: Any = None, **changes: Any) -> FLModel:
    """Return an honest result with some changes: of tensors, or of the metadata if their names start with "meta_"."""
    meta = {"client_name": client, "NUM_STEPS_CURRENT_ROUND": 1}
    meta.update({name.removeprefix("meta_"): value for name, value in changes.items() if name.startswith("meta_")})
    tensors = {"a": torch.full((2,), float(number)), "b": torch.ones(1)}
    tensors.update({name: value for name, value in changes.items() if not name.startswith("meta_")})
    return FLModel(
        params=tensors, params_type=kind, metrics={"accuracy": 0.5} if metrics is None else metrics, meta=meta
    )


SKIPPED, COUNTS = (2.0, 0.5), (3.0, 0.5)


def kind_of_data(fl_ctx: Any) -> None:
    for kind, meta, counts in (
        (DataKind.WEIGHTS, {}, True),
        (DataKind.COLLECTION, {}, False),
        ("X", {}, False),
        (7, {}, False),
        (DataKind.WEIGHTS, {MetaKey.PROCESSED_ALGORITHM: "x"}, False),
    ):
        offload = one_component(fl_ctx, FedAvg(num_clients=2))
        result = DXO(kind, data={"a": torch.ones(2)}, meta=meta).to_shareable()
        assert accepted(offload, fl_ctx, result) == counts, kind


def models_or_differences(fl_ctx: Any) -> None:
    for first in (True, False):
        odd = sent("odd", 7, kind=ParamsType.DIFF)
        assert Round(fl_ctx).outcome(odd, first=first) == SKIPPED
        assert Round(fl_ctx, params_type="FULL").outcome(odd, first=first) == SKIPPED
    everyone = [sent(f"site-{number}", number, kind=ParamsType.DIFF) for number in (4, 5, 6)]
    assert Round(fl_ctx).outcome(*everyone) == (5.0, 0.5)
    assert Round(fl_ctx, params_type="FULL").outcome(*everyone) == SKIPPED
    assert majority_kind(["DIFF", "FULL"], None) == majority_kind(["DIFF", "FULL"], "FULL") == "FULL"
    assert majority_kind(["DIFF", "FULL"], "DIFF") == majority_kind(["DIFF"], "FULL") == "DIFF"


def names(fl_ctx: Any) -> None:
    assert Round(fl_ctx).outcome(sent("odd", 5)) == COUNTS
    partial = sent("odd", 5)
    del partial.params["b"]
    assert Round(fl_ctx).outcome(partial) == COUNTS
    for name in ("extra", "", 7, None, b"a"):
        odd = sent("odd", 5)
        odd.params[name] = torch.ones(1)
        assert Round(fl_ctx).outcome(odd) == SKIPPED
    with pytest.raises(
        ResultMismatchError, match=r"no 'head\.0\.w'; if this is intended, set exclude_vars, for example"
    ):
        Round(fl_ctx).aggregator.accept_model(sent("odd", 5, **{"head.0.w": torch.ones(1)}))


def names_of_clients(fl_ctx: Any) -> None:
    store = SimpleNamespace(incoming=Path(fl_ctx.get_prop(FLContextKey.APP_ROOT)), max_shard_size=None)
    job_context.set_persistor(
        fl_ctx, cast("Any", SimpleNamespace(names=TensorNames({"c": "a"}), store=store, base=None))
    )
    model = {"a": torch.full((2,), 5.0), "b": torch.ones(1)}
    further = {"c": model["a"], "b": model["b"]}
    for tensors, counts in (
        (model, True),
        (further, True),
        ({**model, "c": torch.full((2,), 100.0)}, True),
        ({f"model.{name}": value for name, value in further.items()}, True),
        ({"x.a": model["a"], "y.b": model["b"]}, False),
        ({"x.a": model["a"], "b": model["b"], "z": model["b"]}, False),
        ({"c": torch.ones(3)}, False),
        ({**model, "c": failed((2,))}, False),
    ):
        odd = sent("odd", 5)
        odd.params = dict(tensors)
        assert Round(fl_ctx).outcome(odd) == (COUNTS if counts else SKIPPED), tensors.keys()


def excluded(fl_ctx: Any) -> None:
    for value in ("text", failed(), torch.full((9,), NAN), object()):
        assert Round(fl_ctx, exclude_vars="^x").outcome(sent("odd", 5, x=value)) == COUNTS


def values(fl_ctx: Any) -> None:
    assert Round(fl_ctx).outcome(sent("odd", 5, a=np.full(2, 5, np.float32))) == COUNTS
    unusable = ("text", None, 5.0, [5.0, 5.0], failed(), torch.ones(2).to_sparse(), torch.ones(2, device="meta"))
    arrays = (np.array(["a", "b"]), np.array([object()] * 2), np.zeros(2, [("x", "f4")]), np.zeros(2, "M8[s]"))
    for value in (*unusable, *arrays):
        assert Round(fl_ctx).outcome(sent("odd", 5, a=value)) == SKIPPED


def shapes(fl_ctx: Any) -> None:
    for shape in ((), (1,), (3,), (1, 2), (0,)):
        assert Round(fl_ctx).outcome(sent("odd", 5, a=torch.ones(shape))) == SKIPPED


def dtypes(fl_ctx: Any) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert Round(fl_ctx).outcome(sent("a-first", 5, a=torch.full((2,), 5, dtype=dtype))) == COUNTS
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn):
        assert Round(fl_ctx).outcome(sent("a-first", 5, a=torch.ones(2).to(dtype))) == SKIPPED


def elements(fl_ctx: Any) -> None:
    for value in (
        torch.tensor([NAN, 1.0]),
        torch.tensor([1.0, -float("inf")]),
        LazyTensor(Gone(8), torch.float32, (2,)),
    ):
        assert Round(fl_ctx).outcome(sent("odd", 5, a=value)) == SKIPPED


def steps(fl_ctx: Any) -> None:
    for good in (1, 0, 1.0, True, None, np.int64(1), torch.tensor([1.0])):
        assert Round(fl_ctx).outcome(sent("odd", 5, meta_NUM_STEPS_CURRENT_ROUND=good)) == COUNTS
    for bad in (-1, NAN, float("inf"), MAX_STEPS * 2, 1e300, "7", [1], 1j, torch.ones(2), failed(()), object()):
        assert Round(fl_ctx).outcome(sent("odd", 5, meta_NUM_STEPS_CURRENT_ROUND=bad)) == SKIPPED
    heavy, _ = Round(fl_ctx).outcome(sent("odd", 5, meta_NUM_STEPS_CURRENT_ROUND=MAX_STEPS))
    assert heavy == pytest.approx(5)


def metrics(fl_ctx: Any) -> None:
    huge = LazyTensor(Gone(1 << 31), torch.float32, (1 << 29,))
    numbers = {"accuracy": torch.tensor([0.5]), "int": 1, "bool": np.True_}
    assert Round(fl_ctx).outcome(sent("odd", 5, metrics=numbers)) == COUNTS
    junk = (NAN, 10**400, [1.0], {"a": 1}, torch.ones(2), torch.tensor(1j), torch.ones(2).to(torch.float8_e5m2), huge)
    for value in (*junk, failed(()), "text", object()):
        assert Round(fl_ctx).outcome(sent("odd", 5, metrics={"accuracy": 0.5, "junk": value, "loss": value})) == COUNTS
        assert Round(fl_ctx).outcome(sent("odd", 5, metrics={"accuracy": value})) == COUNTS
    many = {f"{number}": 1.0 for number in range(2 * MAX_METRICS)}
    round_ = Round(fl_ctx)
    round_.aggregator.accept_model(sent("odd", 5, metrics={**many, "x" * 5000: 1.0}))
    assert len(round_.aggregator.aggregate_model().metrics) == MAX_METRICS


def no_metrics(fl_ctx: Any) -> None:
    result = sent("odd", 5)
    result.metrics = None
    assert Round(fl_ctx).outcome(result) == (3.0, None)


def controls(fl_ctx: Any) -> None:
    good = {"a": torch.full((2,), 5.0), "b": torch.ones(1)}
    nothing = {"a": torch.zeros(2), "b": torch.zeros(1)}
    for change, counts in (
        (good, True),
        ({**good, "a": torch.full((2,), 5.0, dtype=torch.float64)}, True),
        (None, False),
        ("text", False),
        ({}, False),
        ({**good, "b": "text"}, False),
        ({**good, "b": np.array(["text"])}, False),
        ({**good, "x": torch.ones(1)}, False),
        ({**good, "b": torch.ones(2)}, False),
        ({**good, "b": torch.ones(1, dtype=torch.int64)}, False),
        ({**good, "b": torch.full((1,), NAN)}, False),
        ({**good, "b": failed((1,))}, False),
        ({**good, "b": LazyTensor(Gone(4), torch.float32, (1,))}, False),
    ):
        found = scaffold_round(fl_ctx, [sent("odd", 5, meta_scaffold_c_diff=change)], honest_change=nothing)
        assert found == ((3.0, 5 / 3) if counts else (2.0, 0.0)), change
    for value in (torch.full((2,), NAN), LazyTensor(Gone(8), torch.float32, (2,)), torch.ones(5)):
        # The model is unusable: good control variates do not count either.
        odd = sent("odd", 5, a=value, meta_scaffold_c_diff=good)
        assert scaffold_round(fl_ctx, [odd], honest_change=nothing) == (2.0, 0.0)


def the_round(fl_ctx: Any) -> None:
    for stated, counts in ((0, True), (None, True), (1, False), ("0", False), (0.0, False), (torch.zeros(2), False)):
        round_ = Round(fl_ctx)
        for client, number in (("odd", 5), ("site-1", 1), ("site-3", 3)):
            result = DXO(DataKind.WEIGHTS, data=sent(client, number).params).to_shareable()
            if stated is not None:
                result.add_cookie(AppConstants.CONTRIBUTION_ROUND, stated if client == "odd" else 0)
            receive_from(fl_ctx, client, result)
            TensorOffload().handle_event(EventType.AFTER_TASK_RESULT_FILTER, fl_ctx)
            assert round_.aggregator.accept(result, fl_ctx) == (counts or client != "odd")
        assert round_.aggregator.aggregate_model().params["a"].tolist()[0] == (3.0 if counts else 2.0)


def further_results(fl_ctx: Any) -> None:
    assert Round(fl_ctx).outcome(sent("site-1", 100), first=False) == SKIPPED


def other_metadata(fl_ctx: Any) -> None:
    odd = sent("odd", 5, meta_props=failed(), meta_current_round="x", meta_junk={1: object()})
    assert Round(fl_ctx).outcome(odd) == COUNTS


def models_to_evaluate(fl_ctx: Any) -> None:
    controller, saved = evaluation(fl_ctx)
    for kind, data in (
        (DataKind.WEIGHTS, {"a": torch.ones(2)}),
        (DataKind.WEIGHTS, {"a": "text", "b": torch.ones(2)}),
        (DataKind.WEIGHTS, {"a": failed()}),
        (DataKind.WEIGHTS, {7: torch.ones(2)}),
        (DataKind.WEIGHTS, {}),
        (DataKind.COLLECTION, {"../x": DXO(DataKind.WEIGHTS, data={"a": torch.ones(2)})}),
        (DataKind.COLLECTION, {"x": 7}),
    ):
        controller._accept_local_model("site-1", DXO(kind, data=data).to_shareable(), fl_ctx)
    assert saved == ["site-1"]


def evaluations(fl_ctx: Any) -> None:
    controller, _ = evaluation(fl_ctx)
    controller._client_models["site-2"] = "model"
    for owner in ("site-2", "../../x", "unknown", 7, ["site-2"], None):
        result = DXO(DataKind.METRICS, data={"accuracy": 0.5}).to_shareable()
        result.add_cookie(AppConstants.MODEL_OWNER, owner)
        controller._accept_val_result("site-1", result, fl_ctx)
    assert list(controller._val_results) == ["site-1"]
    assert list(controller._val_results["site-1"]) == ["site-2"]


CASES: dict[str, Callable[[Any], None]] = {
    "the kind of data": kind_of_data,
    "models or differences": models_or_differences,
    "names of tensors": names,
    "names in a job that started from a Hugging Face directory": names_of_clients,
    "tensors that `exclude_vars` matches": excluded,
    "the value of a tensor": values,
    "a shape": shapes,
    "a dtype": dtypes,
    "elements of a tensor": elements,
    "training steps": steps,
    "a metric": metrics,
    "no metrics": no_metrics,
    "SCAFFOLD's control variates": controls,
    "a round": the_round,
    "a further result": further_results,
    "other metadata": other_metadata,
    "a model to evaluate": models_to_evaluate,
    "an evaluation": evaluations,
}


def test_each_row_has_a_case():
    """A rule without a case, or a case without a rule, is an error."""
    assert [row[0] for row in rows(sections("security.md")["Acceptance of a result"])] == list(CASES)


@pytest.mark.parametrize("row", CASES)
def test_rule(row, fl_ctx, scratch):
    """What the row accepts counts; everything else costs its sender alone."""
    CASES[row](fl_ctx)


# ---- level 1 -----------------------------------------------------------------------------------------------------


def test_nothing_of_a_rejected_result_is_in_nvflares_sum(fl_ctx, caplog):
    """Three good tensors and a string as the last value: NVFlare would add the first three."""
    offload = one_component(fl_ctx, FedAvg(num_clients=2), a=[0.0, 0.0], b=[0.0])
    tensors = {"a": torch.full((2,), 1e6), "b": "text"}
    result = DXO(DataKind.WEIGHTS, data=tensors, meta={MetaKey.INITIAL_METRICS: {"accuracy": 9.0}}).to_shareable()
    with caplog.at_level(logging.WARNING):
        assert not accepted(offload, fl_ctx, result)
    assert "Rejected the result of site-1: " in caplog.text
    assert from_shareable(result).meta == {}


@pytest.mark.parametrize("value", ["text", torch.ones(2).to_sparse(), np.array(["a"]), np.array([object()])])
def test_a_result_is_recorded_whatever_it_has(fl_ctx, tmp_path, caplog, value):
    """The size of values that are not tensors does not count."""
    offload = TensorOffload(str(tmp_path / "root"))
    offload.handle_event(EventType.START_RUN, fl_ctx)
    result = DXO(DataKind.WEIGHTS, data={"a": torch.ones(2), "b": value}).to_shareable()
    receive_from(fl_ctx, "site-1", result)
    offload.handle_event(EventType.BEFORE_TASK_RESULT_FILTER, fl_ctx)
    with caplog.at_level(logging.INFO):
        offload.round_log.on_verdict("site-1", accepted=False)
    offload.handle_event(EventType.END_RUN, fl_ctx)
    assert re.search("Received the result of site-1: (8|16) B in", caplog.text)


def test_a_rejected_result_has_an_error_where_nvflare_would_end_the_job(fl_ctx):
    """SCAFFOLD ends the job if a result is empty; of an error, its option decides."""
    offload = one_component(fl_ctx, Scaffold(num_clients=2), a=[0.0, 0.0])
    result = DXO(DataKind.WEIGHTS, data={"a": torch.ones(2)}).to_shareable()
    assert not accepted(offload, fl_ctx, result)
    assert result.get_return_code() == ReturnCode.EXECUTION_RESULT_ERROR
    result = DXO(DataKind.WEIGHTS, data={"a": torch.ones(2)}, meta={"scaffold_c_diff": {"a": torch.ones(2)}})
    assert accepted(offload, fl_ctx, result.to_shareable())


def test_the_kind_of_a_round_at_level_1(fl_ctx):
    """With `params_type`, or after one round, the first result of a round no longer decides what the others are."""

    def of_round(offload: TensorOffload, *kinds: str) -> list[bool]:
        fl_ctx.set_prop(AppConstants.CURRENT_ROUND, 1)
        offload.handle_event(AppEventType.ROUND_STARTED, fl_ctx)
        data = {"a": torch.ones(2)}
        results = [DXO(kind, data=dict(data)).to_shareable() for kind in kinds]
        return [accepted(offload, fl_ctx, result, f"site-{n}") for n, result in enumerate(results)]

    full, diff = DataKind.WEIGHTS, DataKind.WEIGHT_DIFF
    configured = one_component(fl_ctx, FedAvg(num_clients=2), params_type="FULL", a=[0.0, 0.0])
    assert of_round(configured, diff, full, full) == [False, True, True]
    offload = one_component(fl_ctx, FedAvg(num_clients=2), a=[0.0, 0.0])
    assert of_round(offload, diff, full, full) == [True, False, False]
    assert of_round(offload, diff, full, full) == [False, True, True]
    aggregator = InTimeAccumulateWeightedAggregator(expected_data_kind=diff)
    aggregator.handle_event(EventType.START_RUN, fl_ctx)
    expecting = one_component(fl_ctx, SimpleNamespace(aggregator=aggregator), a=[0.0, 0.0])
    assert of_round(expecting, full, diff) == [False, True]


@pytest.mark.parametrize("reference", [torch.zeros(2, dtype=torch.float16), np.zeros(2, np.float32)])
def test_other_precisions_become_those_of_the_model(fl_ctx, reference):
    """NVFlare's sum has the dtype of its first result, and tensors and arrays do not add up."""
    offload = one_component(fl_ctx, FedAvg(num_clients=2))
    fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)["weights"]["a"] = reference
    for value in (torch.ones(2, dtype=torch.float64), np.ones(2, np.float16), torch.ones(2, dtype=torch.bfloat16)):
        result = DXO(DataKind.WEIGHTS, data={"a": value}).to_shareable()
        assert accepted(offload, fl_ctx, result)
        found = from_shareable(result).data["a"]
        assert found.dtype == reference.dtype
        assert isinstance(found, np.ndarray) == isinstance(reference, np.ndarray)
        assert found.tolist() == [1.0, 1.0]


def test_what_nvflare_excludes_is_not_checked(fl_ctx):
    """A controller's `exclude_vars` holds for the acceptance; tensors for other aggregators are passed on."""
    data = {"a": torch.ones(2), "head": torch.ones(7)}
    for controller, expected in (
        (FedAvg(num_clients=2), False),
        (FedAvg(num_clients=2, exclude_vars="^head"), True),
        (FedAvg(num_clients=2, aggregator=LazyAggregator(exclude_vars="^head")), True),
        (SimpleNamespace(aggregator=object()), True),
    ):
        offload = one_component(fl_ctx, controller, a=[0.0, 0.0])
        result = DXO(DataKind.WEIGHTS, data=dict(data)).to_shareable()
        assert accepted(offload, fl_ctx, result) == expected
        assert set(from_shareable(result).data) == (set(data) if expected else set())


@pytest.mark.parametrize("component", [LazyAggregator, TensorOffload])
def test_params_type_is_validated(component):
    """By the constructor."""
    with pytest.raises(ValueError, match="params_type must be 'FULL', 'DIFF' or None, got 'WEIGHTS'"):
        component(params_type="WEIGHTS")


def test_one_client_does_not_turn_tensors_into_arrays(fl_ctx, scratch):
    """Most clients decide whether the next model has tensors or arrays."""
    round_ = Round(fl_ctx)
    round_.aggregator.accept_model(sent("a-first", 5, a=np.full(2, 5, np.float32), b=np.ones(1, np.float32)))
    for number in (1, 3):
        round_.aggregator.accept_model(sent(f"site-{number}", number))
    assert all(isinstance(value, torch.Tensor) for value in round_.aggregator.aggregate_model().params.values())


# ---- helpers -----------------------------------------------------------------------------------------------------


class Gone(ByteSource):
    """Bytes that cannot be read."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        raise OSError("the disk is gone")

    def describe(self) -> str:
        return "nowhere"


def failed(shape: tuple[int, ...] = (2,)) -> torch.Tensor:
    return LazyTensor(FailedSource(4 * int(np.prod(shape)), OSError("not received")), torch.float32, shape)


def one_component(fl_ctx: Any, controller: Any, params_type: Any = None, **model: Any) -> TensorOffload:
    """Return a `TensorOffload` and a running controller whose global model this is."""
    give(fl_ctx, **(model or {"a": [0.0, 0.0]}))
    fl_ctx.set_prop(FLContextKey.RUNNER, SimpleNamespace(current_wf=SimpleNamespace(controller=controller)))
    return TensorOffload(params_type=params_type)


def accepted(offload: TensorOffload, fl_ctx: Any, result: Shareable, client: str = "site-1") -> bool:
    """Whether the result of a client has tensors after `TensorOffload` has seen it."""
    receive_from(fl_ctx, client, result)
    offload.handle_event(EventType.AFTER_TASK_RESULT_FILTER, fl_ctx)
    return bool(from_shareable(result).data)


def scaffold_round(fl_ctx: Any, crafted: list[FLModel], honest_change: dict[str, Any]) -> tuple[float, float]:
    """Return the first elements of the model and of the control variates after a round of SCAFFOLD."""
    give(fl_ctx, a=[0.0, 0.0], b=[0.0])
    controller = LazyScaffold(num_clients=3)
    controller.fl_ctx = fl_ctx
    aggregator = controller.aggregator
    aggregator.controls = zero_controls(fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)["weights"])
    honest = [sent(f"site-{number}", number, meta_scaffold_c_diff=dict(honest_change)) for number in (1, 3)]
    taken = controller._accept([*crafted, *honest])
    assert all(result in taken for result in honest)
    model = aggregator.aggregate_model()
    aggregator.update_controls(controller._update, 0)
    return model.params["a"].tolist()[0], pytest.approx(aggregator.controls["a"].tolist()[0])


def evaluation(fl_ctx: Any) -> tuple[LazyCrossSiteEval, list[str]]:
    """Return a cross-site evaluation in a directory, and the models that it sends out."""
    controller = LazyCrossSiteEval()
    directory = Path(fl_ctx.get_prop(FLContextKey.APP_ROOT))
    controller._cross_val_models_dir = controller._cross_val_results_dir = str(directory)
    evaluated: list[str] = []
    controller._send_validation_task = lambda name, _: evaluated.append(name)
    return controller, evaluated
