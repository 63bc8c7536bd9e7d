# SPDX-License-Identifier: Apache-2.0
"""Crafted results against every aggregation: one client costs its own contribution, and nothing else.

A generator combines values, dtypes, shapes, names and metrics with metadata and control variates. After each round, the
log has one reason for each skipped client, and the other clients alone have made the model, bit for bit, and the
metrics. With `HYPOTHESIS_PROFILE=night`, there are fifty times as many results.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nvflare.apis.dxo import DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.aggregators.intime_accumulate_model_aggregator import InTimeAccumulateWeightedAggregator
from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.fedavg import FedAvg

from nvflare_lazy.errors import ResultMismatchError
from nvflare_lazy.flare import LazyAggregator, LazyScaffold, TensorOffload
from nvflare_lazy.flare.weights import zero_controls
from nvflare_lazy.tensors.byte_source import ByteSource, FailedSource
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from tests.flare.conftest import receive_from

CONTROLS = "scaffold_c_diff"
NAN, INFINITY = float("nan"), float("inf")
HONEST, CRAFTED = 5, 5
REASON = re.compile("(?:(?:skipped the|Rejected the|ignored a late) result of|discarding DXO from) ([^ :]+)")


class Unreadable(ByteSource):
    """Bytes whose read fails, or that are too many to read."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        raise OSError("the disk is gone")

    def describe(self) -> str:
        return "a disk that is gone"


class HostileDict(dict[Any, Any]):
    """A dictionary whose own methods fail."""

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def items(self) -> Any:
        raise RuntimeError("no items")

    __iter__ = keys = values = items
    __bool__ = lambda self: True  # noqa: E731


def failed(shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    return LazyTensor(FailedSource(4 * int(np.prod(shape)), OSError("not received")), torch.float32, shape)


def unreadable(shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    return LazyTensor(Unreadable(4 * int(np.prod(shape))), torch.float32, shape)


def model(kind: str, number: int) -> dict[str, Any]:
    """Small whole numbers, so that sums are exact in any order and precision."""
    tensors = {
        "w": torch.arange(6, dtype=torch.float32).reshape(2, 3) + number,
        "h": torch.full((4,), number, dtype=torch.float16),
        "n": torch.tensor(number),
    }
    return {name: value.numpy() for name, value in tensors.items()} if kind == "arrays" else tensors


#: Values that no tensor may have, whatever the tensor.
NO_TENSORS: dict[str, Callable[[], Any]] = {
    "text": lambda: "9" * 50,
    "bytes": lambda: b"\0" * 24,
    "none": lambda: None,
    "list": lambda: [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]],
    "dictionary": lambda: {"w": torch.ones(2, 3)},
    "number": lambda: 7.0,
    "object": object,
    "array of text": lambda: np.array([["a", "b", "c"], ["d", "e", "f"]]),
    "array of bytes": lambda: np.zeros((2, 3), "S8"),
    "array of objects": lambda: np.array([[object()] * 3] * 2),
    "array of records": lambda: np.zeros((2, 3), [("a", "f4"), ("b", "i8")]),
    "array of dates": lambda: np.zeros((2, 3), "M8[s]"),
    "sparse": lambda: torch.ones(2, 3).to_sparse(),
    "meta": lambda: torch.ones(2, 3, device="meta"),
    "failed": failed,
    "huge list": lambda: list(range(2000)),
    "nested lists": lambda: [[[[[["deep"]]]]]],
}
#: Dtypes that "w" (float32) must not have. NVFlare's own mean turns integers into float32, so its models may.
OTHER_DTYPES = (torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
PRECISIONS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((), (1,), (3,), (2,), (3, 2), (2, 3, 1), (1, 2, 3), (0,), (0, 3), (2, 4), (6,))
NAMES: tuple[Any, ...] = (
    "extra",
    "w ",
    "W",
    "",
    "x" * 20_000,
    "line\nbreak \x1b[31m\u202e",
    "w\0",
    7,
    None,
    b"w",
    ("w",),
)
BAD_STEPS: tuple[Any, ...] = (
    *(-1, -0.5, NAN, INFINITY, -INFINITY, 1e300, 2e12, 10**400, "7", "many", [1], {"a": 1}, 1j, b"3"),
    *(np.complex64(1), torch.tensor([1, 2]), torch.tensor(NAN), np.array("3"), torch.zeros(0), failed(()), object()),
)
GOOD_STEPS: tuple[Any, ...] = (None, True, 1.0, np.float32(1), np.int64(1), torch.tensor(1), torch.ones(1, 1), 0)
#: Values that are not finite numbers.
NO_METRICS: tuple[Any, ...] = (
    *(NAN, INFINITY, 10**400, [1.0, 2.0], (1.0,), {"a": 1}, None, 1j, b"1", {1.0}, object(), "x" * 1000),
    *(torch.ones(2), np.ones(3), torch.tensor(1j), torch.tensor(NAN), torch.zeros(0), np.array("1"), np.complex128(1)),
    *(failed(()), unreadable(()), unreadable((1 << 29,)), torch.ones(1).to_sparse(), [unreadable((1 << 29,))]),
)
METRICS_OF_OTHER_TYPES: tuple[Any, ...] = ("text", [1.0], (), torch.ones(3), b"x", {1, 2}, unreadable((1 << 29,)))


class Crafted:
    """One result, and whether it counts."""

    def __init__(self, kind: str, number: int) -> None:
        self.params: Any = model(kind, number)
        self.meta: Any = {"NUM_STEPS_CURRENT_ROUND": 1, "initial_metrics": {"acc": 1.0}, CONTROLS: model(kind, number)}
        self.data_kind: Any = DataKind.WEIGHTS
        self.counts = True
        self.headers: dict[str, Any] = {}
        self.cookies: Any = {AppConstants.CONTRIBUTION_ROUND: 0}

    def shareable(self) -> Shareable:
        result = Shareable()
        result["DXO"] = {"kind": self.data_kind, "data": self.params, "meta": self.meta}
        for name, value in {"__content_type__": "DXO", **self.headers}.items():
            result.set_header(name, value)
        result.set_cookie_jar(self.cookies)
        return result


def craft(random_: random.Random, kind: str, target: type[Target]) -> Crafted:
    """Return a result with up to two flaws, each of which may make it useless."""
    result = Crafted(kind, 0)
    tensors = (spoil_tensor, spoil_tensor, spoil_names, spoil_everything, *target.flaws)
    for flaws in (tensors, (spoil_steps, spoil_metrics, spoil_meta)):
        if random_.random() < 0.6:
            result.counts &= random_.choice(flaws)(result, random_, target)
    if result.data_kind != DataKind.WEIGHTS and isinstance(result.meta, dict):
        # `TensorOffload` leaves other kinds of data alone, and NVFlare itself skips such metrics.
        result.counts &= isinstance(result.meta["initial_metrics"], dict)
    return result


def spoil_tensor(result: Crafted, random_: random.Random, target: type[Target], part: Any = None) -> bool:
    """Replace the value, the dtype or the shape of a tensor."""
    tensors = result.params if part is None else part
    if not isinstance(tensors, dict):
        return True
    how, names = random_.randrange(5), "whn" if part is None else "wh"
    if how == 0:
        tensors[random_.choice(names)] = random_.choice([*NO_TENSORS.values()])()
        return False
    if how == 1:
        dtype = random_.choice(OTHER_DTYPES if target.averages_integers else OTHER_DTYPES + INTEGERS)
        tensors["w"] = torch.ones(2, 3).to(dtype)
        return False
    if how == 2:
        name = random_.choice(names)
        shape = random_.choice([shape for shape in SHAPES if shape != tuple(np.shape(model("tensors", 0)[name]))])
        tensors[name] = torch.ones(shape, dtype=model("tensors", 0)[name].dtype)
        return False
    if how == 3:  # other precisions are converted, and so are arrays
        name = random_.choice("wh")
        value = torch.as_tensor(model("tensors", 0)[name]).to(random_.choice(PRECISIONS))
        is_array = value.dtype is not torch.bfloat16 and random_.random() < 0.5
        tensors[name] = value.numpy() if is_array else value
        return True
    tensors["w"] = np.asarray(model("arrays", 0)["w"], ">f4")
    return True


def spoil_names(result: Crafted, random_: random.Random, target: type[Target]) -> bool:
    """Add or replace a name, or use another dictionary."""
    if not isinstance(result.params, dict):
        return True
    how = random_.randrange(5)
    if how == 0:
        result.params.update({f"{number}.{'x' * 50}": torch.ones(1) for number in range(200)})
    elif how == 1:
        result.params = HostileDict(result.params)
        return True
    elif how == 2:
        result.params.clear()
    else:
        result.params[random_.choice(NAMES)] = torch.ones(1)
    return False


def spoil_steps(result: Crafted, random_: random.Random, target: type[Target]) -> bool:
    if not isinstance(result.meta, dict):
        return True
    if random_.random() < 0.7:
        result.meta["NUM_STEPS_CURRENT_ROUND"] = random_.choice(BAD_STEPS)
        return False
    steps = result.meta["NUM_STEPS_CURRENT_ROUND"] = random_.choice(GOOD_STEPS)
    return target.counts_zero_steps or steps is None or bool(steps != 0)


def spoil_metrics(result: Crafted, random_: random.Random, target: type[Target]) -> bool:
    """Metrics never cost more than themselves."""
    if isinstance(result.meta, dict):
        if random_.random() < 0.8:
            names: Any = random_.choice([["junk"], ["junk", "more"], [7], ["x" * 5000], [None, "a\nb"]])
            junk = {name: random_.choice(NO_METRICS) for name in names}
            result.meta["initial_metrics"] = {**junk, "acc": 1.0, "tensor": torch.tensor(2.0)}
        else:
            result.meta["initial_metrics"] = random_.choice(METRICS_OF_OTHER_TYPES)
    return True


def spoil_meta(result: Crafted, random_: random.Random, target: type[Target]) -> bool:
    if random_.random() < 0.3:
        result.meta = random_.choice(["text", [1], 7, torch.ones(3), b"x"])
        return False
    if isinstance(result.meta, dict):
        result.meta.update({7: failed(), "junk": NAN, None: "x", "client_name": "honest-0", "props": 5})
    jars = ["jar", [1], {AppConstants.CONTRIBUTION_ROUND: random_.choice(["0", torch.ones(2), [0], 1.0, 5])}]
    result.cookies = random_.choice(jars)
    return not target.reads_cookies


def spoil_everything(result: Crafted, random_: random.Random, target: type[Target]) -> bool:
    """Another kind of data, or another value instead of the tensors."""
    if random_.random() < 0.5:
        result.data_kind = random_.choice(["COLLECTION", "ANALYTIC", "X", 5, None, ("WEIGHTS",), [1], "WEIGHT_DIFF2"])
        # NVFlare takes an unknown kind for a model.
        return target.takes_any_kind and not isinstance(result.data_kind, list)
    result.params = random_.choice(["text", [1.0], 7, torch.ones(2, 3), ("w",), b"x"])
    return False


def spoil_controls(result: Crafted, random_: random.Random, target: type[Target]) -> bool:
    if not isinstance(result.meta, dict) or CONTROLS not in result.meta:
        return True
    if random_.random() < 0.3:
        if random_.random() < 0.5:
            del result.meta[CONTROLS]
        else:
            result.meta[CONTROLS] = random_.choice(["text", [1.0], None, {}, torch.ones(3)])
        return False
    return spoil_tensor(result, random_, target, result.meta[CONTROLS])


def spoil_values(result: Crafted, random_: random.Random, target: type[Target]) -> bool:
    """Flaws that only reading finds."""
    parts = [part for part in (result.params, result.meta) if isinstance(part, dict)]
    part = random_.choice(parts) if parts else {}
    if part is result.meta:
        part = part.get(CONTROLS) if CONTROLS in target.read_names else result.params
    if isinstance(part, dict) and "w" in dict.keys(part):
        part["w"] = random_.choice([torch.full((2, 3), NAN), torch.full((2, 3), -INFINITY), unreadable()])
        return False
    return True


class Target:
    """A way of aggregation."""

    flaws: tuple[Callable[..., bool], ...] = ()
    averages_integers = False
    counts_zero_steps = True
    reads_cookies = False
    takes_any_kind = False
    has_metrics = True
    read_names: tuple[str, ...] = ()

    def __init__(self, fl_ctx: FLContext) -> None:
        self.fl_ctx = fl_ctx
        self.start()

    def start(self) -> None: ...

    def give(self, client: str, result: Shareable) -> None:
        raise NotImplementedError

    def finish(self) -> tuple[dict[str, Any], Any]:
        """Aggregate; return tensors by name, and metrics."""
        raise NotImplementedError

    def convert(self, client: str, result: Shareable) -> FLModel | None:
        """Convert a result as NVFlare's controller does it; what it cannot convert, it skips."""
        try:
            converted = FLModelUtils.from_shareable(result)
        except Exception as error:
            logging.getLogger("nvflare").warning("skipped the result of %s: %s", client, error)
            return None
        converted.meta["client_name"] = client
        return converted


class ModelAggregation(Target):
    """`LazyAggregator` in FedAvg."""

    flaws = (spoil_values,)
    takes_any_kind = True

    def start(self) -> None:
        self.offload = TensorOffload()
        self.aggregator = LazyAggregator()
        self.aggregator.handle_event(EventType.START_RUN, self.fl_ctx)

    def give(self, client: str, result: Shareable) -> None:
        receive_from(self.fl_ctx, client, result)
        self.offload.handle_event(EventType.AFTER_TASK_RESULT_FILTER, self.fl_ctx)
        converted = self.convert(client, result)
        if converted is None:
            return
        if not converted.params:
            # NVFlare's FedAvg also does so for a result that `TensorOffload` has rejected.
            logging.getLogger("nvflare").warning("Empty result of %s", client)
            return
        with contextlib.suppress(ResultMismatchError):
            self.aggregator.accept_model(converted)

    def finish(self) -> tuple[dict[str, Any], Any]:
        combined = self.aggregator.aggregate_model()
        return combined.params, combined.metrics


class ShareableAggregation(ModelAggregation):
    """`LazyAggregator` in ScatterAndGather."""

    reads_cookies = True
    takes_any_kind = False

    def give(self, client: str, result: Shareable) -> None:
        receive_from(self.fl_ctx, client, result)
        self.aggregator.accept(result, self.fl_ctx)


class ScaffoldAggregation(ModelAggregation):
    """`LazyScaffold`: the model and the control variates count together, or not at all."""

    flaws = (spoil_values, spoil_controls, spoil_controls)
    read_names = (CONTROLS,)

    def start(self) -> None:
        self.offload = TensorOffload()
        self.controller = LazyScaffold(num_clients=2)
        self.controller.fl_ctx = self.fl_ctx
        self.controller.current_round = 0
        self.aggregator = self.controller.aggregator
        self.aggregator.fl_ctx = self.fl_ctx
        weights = self.fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)["weights"]
        self.aggregator.controls = zero_controls(weights)

    def finish(self) -> tuple[dict[str, Any], Any]:
        combined = self.aggregator.aggregate_model()
        self.aggregator.update_controls(self.controller._update, 0)
        controls = {f"control {name}": value for name, value in self.aggregator.controls.items()}
        return {**combined.params, **controls}, combined.metrics


class OneComponent(Target):
    """NVFlare's own FedAvg, behind `TensorOffload`."""

    averages_integers = True

    def start(self) -> None:
        self.offload = TensorOffload(params_type="FULL")
        self.controller = FedAvg(num_clients=2)
        self.controller.fl_ctx = self.fl_ctx
        self.controller._aggr_helper = WeightedAggregationHelper()
        self.controller._aggr_metrics_helper = WeightedAggregationHelper()
        self.run(self.controller)

    def run(self, controller: Any) -> None:
        runner = SimpleNamespace(current_wf=SimpleNamespace(controller=controller))
        self.fl_ctx.set_prop(FLContextKey.RUNNER, runner, private=True, sticky=False)

    def give(self, client: str, result: Shareable) -> None:
        receive_from(self.fl_ctx, client, result)
        self.offload.handle_event(EventType.AFTER_TASK_RESULT_FILTER, self.fl_ctx)
        self.collect(client, result)

    def collect(self, client: str, result: Shareable) -> None:
        converted = self.convert(client, result)
        if converted is not None:
            self.controller._aggregate_one_result(converted)

    def finish(self) -> tuple[dict[str, Any], Any]:
        combined = self.controller._get_aggregated_result()
        return combined.params, combined.metrics


class OneComponentScatterAndGather(OneComponent):
    """NVFlare's own aggregator in ScatterAndGather, behind `TensorOffload`."""

    counts_zero_steps = False
    reads_cookies = True
    has_metrics = False

    def start(self) -> None:
        self.offload = TensorOffload()
        self.aggregator = InTimeAccumulateWeightedAggregator(expected_data_kind=DataKind.WEIGHTS)
        self.aggregator.handle_event(EventType.START_RUN, self.fl_ctx)
        self.run(SimpleNamespace(aggregator=self.aggregator))

    def collect(self, client: str, result: Shareable) -> None:
        self.aggregator.accept(result, self.fl_ctx)

    def finish(self) -> tuple[dict[str, Any], Any]:
        return from_shareable(self.aggregator.aggregate(self.fl_ctx)).data, None


TARGETS = [ModelAggregation, ShareableAggregation, ScaffoldAggregation, OneComponent, OneComponentScatterAndGather]


class Messages(logging.Handler):
    """Collects the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def messages() -> Iterator[Messages]:
    handler = Messages()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


def bits(tensors: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = {}
    for name, value in tensors.items():
        plain = value.materialize() if isinstance(value, (LazyTensor, LazyArray)) else value
        plain = plain.numpy() if isinstance(plain, torch.Tensor) else plain
        found[name] = (str(plain.dtype), plain.shape, plain.tobytes())
    return found


@pytest.mark.parametrize("kind", ["tensors", "arrays"])
@pytest.mark.parametrize("target", TARGETS)
def test_one_client_cannot_hurt_the_others(target, kind, fl_ctx, scratch, messages):
    """However results are crafted: the model and metrics of the clients that count, and a reason for each other."""
    fl_ctx.set_prop(AppConstants.GLOBAL_MODEL, make_model_learnable(model(kind, 0), {}))
    known: dict[int, Any] = {}

    def aggregate(results: list[tuple[str, Crafted]]) -> Any:
        messages.lines.clear()
        way = target(fl_ctx)
        for client, result in results:
            way.give(client, result.shareable())
        tensors, metrics = way.finish()
        return bits(tensors), metrics

    def honest() -> list[tuple[str, Crafted]]:
        return [(f"honest-{number}", Crafted(kind, number)) for number in range(HONEST)]

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    @given(st.integers(0, 2**64))
    def check(seed: int) -> None:
        random_ = random.Random(seed)
        crafted = [(f"crafted-{number}", craft(random_, kind, target)) for number in range(CRAFTED)]
        results = crafted + honest()
        random_.shuffle(results)
        counting = sum(result.counts for _, result in crafted)
        if counting not in known:
            known[counting] = aggregate(honest() + [(f"good-{n}", Crafted(kind, 0)) for n in range(counting)])
        found, metrics = aggregate(results)
        lines = [line for line in messages.lines if REASON.search(line) or "Empty result" in line]
        for client, result in crafted:
            reasons = [line for line in lines if REASON.search(line) and REASON.search(line).group(1) == client]
            is_empty = any(client in line for line in lines if "Empty result" in line)
            assert bool(reasons or is_empty) != result.counts, (client, vars(result), reasons)
            assert sum("discarding" not in line for line in reasons) <= 1
        assert all(len(line) < 2000 and line.isprintable() for line in lines)
        expected, expected_metrics = known[counting]
        assert found == expected
        if expected_metrics is not None:
            assert metrics["acc"] == expected_metrics["acc"] == 1.0
            assert metrics.keys() <= {"acc", "tensor"}

    check()
