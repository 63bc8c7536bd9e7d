# SPDX-License-Identifier: Apache-2.0
"""The same model, metrics and statistics as NVFlare's own aggregation; results are all-or-nothing.

What each rule makes of its inputs is in the tests of aggregation.
"""

from __future__ import annotations

import functools
import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nvflare.apis.client import Client
from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.base_fedavg import BaseFedAvg

import nvflare_lazy
from nvflare_lazy.aggregation import rule_names
from nvflare_lazy.errors import ResultMismatchError, TooFewResultsError
from nvflare_lazy.flare import LazyAggregator, job_context
from nvflare_lazy.flare.lazy_aggregator import AggregationStatsKey
from nvflare_lazy.flare.round_log import RoundLog
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from tests.flare.conftest import files_below, give, receive_from

NAN = float("nan")


@pytest.fixture
def aggregator(fl_ctx, scratch):
    """Maker of aggregators that are in a run whose global model has two tensors."""
    give(fl_ctx, a=[0.0, 0.0], b=[0.0])

    def make(**arguments):
        made = LazyAggregator(**arguments)
        made.handle_event(EventType.START_RUN, fl_ctx)
        return made

    return make


def values(model: FLModel) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in model.params.items()}


METRICS = [
    ({"accuracy": 0.5, "loss": 2.0}, {"accuracy": 1.0, "loss": 1.0}),
    ({"accuracy": 0.5}, {"accuracy": 1.0, "auc": 0.7}),
    ({"accuracy": 0.5, "confusion": {"tp": 3}, "name": "x"}, {"accuracy": 1.0, "confusion": {"tp": 1}}),
    ({"good": True}, {"good": False}),
    ({"accuracy": np.float32(0.5)}, {"accuracy": np.float32(0.25)}),
    ({"accuracy": 0.5}, None),
    ({}, {}),
    (None, None),
]


@pytest.mark.parametrize("metrics", METRICS)
def test_metrics_are_averaged_as_nvflare_does_without_an_aggregator(aggregator, result, metrics):
    """Weighted by steps, each metric over those who report it, none if a client reports none."""
    mine = aggregator()
    models = [result(f"site-{n}", n, a=[float(n)] * 2, metrics=reported) for n, reported in enumerate(metrics, 1)]
    expected = BaseFedAvg.aggregate_fn(
        [FLModel(params={"a": torch.ones(2)}, metrics=model.metrics, meta=model.meta) for model in models]
    )
    for model in models:
        mine.accept_model(model)
    found = mine.aggregate_model()
    assert found.metrics == (pytest.approx(expected.metrics) if expected.metrics else None)
    info = found.meta[AppConstants.METRICS_AGGREGATION_INFO]
    assert info.keys() >= expected.meta[AppConstants.METRICS_AGGREGATION_INFO].keys()
    assert {site["name"]: site["weight"] for site in info["site_weights"]} == {"site-1": 1.0, "site-2": 2.0}


@pytest.mark.parametrize("steps", [1, 7, 2.5, None, 0, True, np.float32(7), torch.tensor([7])])
def test_weights_are_those_of_nvflare(aggregator, result, steps):
    """The numbers of steps that honest clients report count as they do in NVFlare; 0 is 1."""
    mine = aggregator()
    models = [result("site-1", steps, a=[1.0, 2.0]), result("site-2", 3, a=[5.0, 6.0])]
    expected = BaseFedAvg.aggregate_fn([FLModel(params=dict(model.params), meta=model.meta) for model in models])
    for model in models:
        mine.accept_model(model)
    assert mine.aggregate_model().params["a"].tolist() == pytest.approx(expected.params["a"].tolist())


def test_excluded_variables_and_weights_of_sites(aggregator, result):
    """Both are what they are for NVFlare's aggregation, which does not look at them once there is an aggregator."""
    mine = aggregator(exclude_vars="^b", aggregation_weights={"site-2": 3.0})
    helper = WeightedAggregationHelper(exclude_vars="^b")
    for number, factor in ((1, 1.0), (2, 3.0)):
        model = result(f"site-{number}", 2, a=[number, 0.5], b=[number])
        helper.add(dict(model.params), factor * 2, f"site-{number}", 0)
        mine.accept_model(model)
    expected = helper.get_result()
    found = mine.aggregate_model()
    assert found.params.keys() == expected.keys() == {"a"}
    assert found.params["a"].tolist() == expected["a"].tolist()


@pytest.mark.parametrize(
    ("arguments", "warnings"),
    [
        ({"aggregation_weights": {"site-1": 2.0}, "exclude_vars": "^b"}, []),
        (
            {"aggregation_weights": {"site-1": 2.0}, "rule": "median"},
            ["aggregation_weights, because the rule median ignores weights"],
        ),
        (
            {"aggregation_weights": {"site-1": 2.0, "site-9": 3.0}},
            ["aggregation_weights of 'site-9', because the job has no such client"],
        ),
        ({"exclude_vars": "^x"}, ["exclude_vars='^x', because no tensor has a matching name"]),
    ],
)
def test_settings_without_effect(aggregator, result, fl_ctx, caplog, arguments, warnings):
    """Each is logged once, in the first round."""
    fl_ctx.get_engine().get_clients = lambda: [Client("site-1", "token")]
    mine = aggregator(**arguments)
    for _ in range(2):
        mine.accept_model(result("site-1", 2, a=[1.0, 0.5], b=[1.0]))
        mine.aggregate_model()
    found = [record.getMessage() for record in caplog.records if "Setting without effect" in record.getMessage()]
    assert len(found) == len(warnings)
    for line, warning in zip(found, warnings, strict=True):
        assert f"Setting without effect: {warning}; remove or correct it" in line


@pytest.mark.parametrize("exclude", [None, "^b"])
def test_statistics_are_where_and_what_nvflare_leaves(aggregator, result, fl_ctx, exclude):
    """`AGGREGATION_STATS` equals NVFlare's report of the same round."""
    mine = aggregator(exclude_vars=exclude)
    helper = WeightedAggregationHelper(exclude_vars=exclude)
    for client, tensors in (("site-2", {"a": [1.0, 2.0], "b": [1.0]}), ("site-1", {"a": [3.0, 4.0]})):
        model = result(client, **tensors)
        helper.add(dict(model.params), 1.0, client, 0)
        mine.accept_model(model)
    expected = {AggregationStatsKey.ROUND: 0, **helper.get_aggregation_stats()}
    mine.aggregate_model()
    assert fl_ctx.get_prop(AppConstants.AGGREGATION_STATS) == expected


UNFIT = {
    "a tensor nobody asked for": ({"a": [9.0, 9.0], "stranger": [1.0]}, "stranger"),
    "another shape": ({"a": [9.0, 9.0], "b": [1.0, 2.0]}, r"'b' has shape \[2\]"),
    "nothing": ({}, "no tensors"),
}


@pytest.mark.parametrize(("tensors", "why"), UNFIT.values(), ids=UNFIT.keys())
def test_a_result_is_taken_whole_or_not_at_all(aggregator, result, caplog, tensors, why):
    """Correct tensors in an invalid result do not count, and the log has the client and the reason."""
    mine = aggregator()
    mine.accept_model(result("site-1", a=[1.0, 1.0], b=[1.0]))
    with pytest.raises(ResultMismatchError, match=why), caplog.at_level(logging.WARNING):
        mine.accept_model(result("site-2", 100, **tensors))
    assert "skipped the result of site-2:" in caplog.text
    assert values(mine.aggregate_model()) == {"a": [1.0, 1.0], "b": [1.0]}


def test_a_second_result_is_skipped(aggregator, result):
    """The first result of a client counts."""
    mine = aggregator()
    mine.accept_model(result("site-1", a=[1.0, 1.0]))
    with pytest.raises(ResultMismatchError, match="second result"):
        mine.accept_model(result("site-1", a=[5.0, 5.0]))
    assert values(mine.aggregate_model()) == {"a": [1.0, 1.0]}


def test_what_turns_out_to_be_bad_while_it_is_read_is_left_out(aggregator, result, scratch, caplog):
    """NaN, and a file that was cut short, are found when everything else is done: the others count alone."""
    mine = aggregator()
    cut = result("site-3", a=[5.0, 5.0], b=[5.0])
    for model in (result("site-1", a=[1.0, 1.0], b=[1.0]), result("site-2", a=[NAN, 1.0], b=[2.0]), cut):
        mine.accept_model(model)
    with open(cut.params["a"].source.file_range()[0].path, "r+b") as file:
        file.truncate(10)
    with caplog.at_level(logging.WARNING):
        assert values(mine.aggregate_model()) == {"a": [1.0, 1.0], "b": [1.0]}
    assert "skipped the result of site-2:" in caplog.text
    assert "skipped the result of site-3:" in caplog.text


def test_scratch_of_a_round_goes_when_it_is_aggregated(aggregator, result, scratch):
    """Although NVFlare still holds the messages of the results, only the aggregate is left."""
    mine = aggregator()
    messages = [result(f"site-{n}", a=[float(n)] * 2, b=[float(n)]) for n in range(1, 4)]
    for message in messages:
        mine.accept_model(message)
    assert len(files_below(scratch.path)) == 3
    found = mine.aggregate_model()
    assert [message.params for message in messages] == [{}, {}, {}]
    (left,) = {value.source.file_range()[0].path for value in found.params.values()}
    assert files_below(scratch.path) == [str(left).removeprefix(f"{scratch.path}/")]
    del found
    assert files_below(scratch.path) == []
    assert scratch.used == 0


@pytest.mark.parametrize("arguments", [{}, {"server_optimizer": {"name": "fedadam", "lr": 0.01}}], ids=["mean", "step"])
def test_what_comes_of_a_round_is_counted_once(aggregator, result, scratch, fl_ctx, arguments):
    """An aggregate in scratch, and an optimizer's state there, reserve their size on the disk, in every round."""
    mine = aggregator(**arguments)
    for _ in range(4):
        mine.accept_model(result("site-1", a=[1.0, 2.0], b=[3.0]))
        found = mine.aggregate_model()
        files = [path for path in scratch.path.rglob("*") if path.is_file()]
        assert scratch.used == sum(path.stat().st_size for path in files) > 0
        assert scratch._quota._pending == 0
        give(fl_ctx, **{name: value.clone() for name, value in found.params.items()})
    del found, mine
    assert scratch.used == 0


def test_differences_become_the_whole_model(aggregator, result, fl_ctx):
    """The global model plus the mean of the differences; tensors without one stay as they were."""
    mine = aggregator()
    give(fl_ctx, a=[10.0, 20.0], b=[30.0])
    mine.accept_model(result("site-1", 1, a=[1.0, 0.0], kind=ParamsType.DIFF))
    mine.accept_model(result("site-2", 3, a=[5.0, 4.0], kind=ParamsType.DIFF))
    found = mine.aggregate_model()
    assert found.params_type == ParamsType.FULL
    assert values(found) == {"a": [14.0, 23.0], "b": [30.0]}
    assert all(isinstance(value, LazyTensor) for value in found.params.values())


def test_arrays_come_out_as_arrays(aggregator, fl_ctx):
    """Arrays exchanged as NumPy arrays continue as lazy arrays."""
    mine = aggregator()
    for site in (1, 3):
        params = {"a": np.full(2, site, np.float32), "b": np.full(1, site, np.float32)}
        mine.accept_model(FLModel(params=params, params_type=ParamsType.FULL, meta={"client_name": f"site-{site}"}))
    found = mine.aggregate_model()
    assert all(isinstance(value, LazyArray) for value in found.params.values())
    assert values(found) == {"a": [2.0, 2.0], "b": [2.0]}


@pytest.mark.parametrize("on_disk", [True, False])
def test_results_in_memory_are_told_once(aggregator, result, caplog, on_disk):
    """If the component that receives on disk is missing, the log has its name."""
    mine = aggregator()
    for _ in range(2):
        sent = result("site-1", a=[1.0, 2.0], b=[3.0])
        if not on_disk:
            sent.params = {name: value.materialize() for name, value in sent.params.items()}
        mine.accept_model(sent)
        mine.aggregate_model()
    assert caplog.text.count("Add nvflare_lazy.flare.TensorOffload") == (0 if on_disk else 1)


def test_too_few_results(aggregator, result):
    """The job fails, or skips the round with the global model as it is; the next round begins empty."""
    mine = aggregator(min_results=2)
    mine.accept_model(result("site-1", a=[1.0, 1.0]))
    with pytest.raises(TooFewResultsError, match="round 0 has 1 usable results, and min_results is 2"):
        mine.aggregate_model()
    skipping = aggregator(min_results=2, on_too_few="skip")
    skipping.accept_model(result("site-1", a=[1.0, 1.0]))
    assert values(skipping.aggregate_model()) == {"a": [0.0, 0.0], "b": [0.0]}
    skipping.accept_model(result("site-1", a=[1.0, 1.0], b=[1.0]))
    skipping.accept_model(result("site-2", a=[2.0, 2.0], b=[2.0]))
    assert values(skipping.aggregate_model())["a"] == [1.5, 1.5]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rule": "meen"}, "meen"),
        ({"rule_args": {"num_byzantine": 1}}, "num_byzantine"),
        ({"on_too_few": "wait"}, "on_too_few"),
        ({"on_non_finite": "ignore"}, "ignore"),
        ({"exclude_vars": "("}, r"\("),
        ({"memory_budget": "lots"}, "lots"),
        ({"server_optimizer": {"name": "fedadam", "lr": 0.01, "speed": 3}}, "speed"),
        ({"server_optimizer": {"name": "adam"}}, "adam"),
    ],
)
def test_what_is_wrong_in_a_configuration_is_said_at_once(arguments, says):
    """Not at the end of the first round, when the clients have trained."""
    with pytest.raises((ValueError, TypeError), match=says):
        LazyAggregator(**arguments)


def test_rules_and_server_optimizers_are_named(aggregator, result, fl_ctx):
    """The rule combines the results, and the optimizer applies the combination."""
    robust = aggregator(rule="trimmed_mean", rule_args={"num_byzantine": 1})
    for site, value in enumerate([1.0, 2.0, 3.0, 1e9], 1):
        robust.accept_model(result(f"site-{site}", a=[value, value], b=[value]))
    assert values(robust.aggregate_model()) == {"a": [2.5, 2.5], "b": [2.5]}
    slow = aggregator(server_optimizer={"name": "fedavgm", "lr": 0.5, "momentum": 0.0})
    slow.accept_model(result("site-1", a=[1.0, 2.0], b=[3.0]))
    assert values(slow.aggregate_model()) == {"a": [0.5, 1.0], "b": [1.5]}


def test_executor(aggregator, result, fl_ctx, scratch):
    """Workers compute each round, also with differences and a server optimizer; the end of the run stops them."""
    spec = {"name": "concurrent.futures.ThreadPoolExecutor", "max_workers": 2, "thread_name_prefix": "worker-of-test"}
    for params_type, expected in (("FULL", 1.0), ("DIFF", 1.0)):
        on_workers = aggregator(
            executor=spec, params_type=params_type, server_optimizer={"name": "fedavgm", "lr": 0.5, "momentum": 0.0}
        )
        for _ in range(2):
            for site, value in enumerate([1.0, 3.0], 1):
                contribution = result(f"site-{site}", a=[value, value], b=[value])
                contribution.params_type = params_type
                on_workers.accept_model(contribution)
            assert values(on_workers.aggregate_model()) == {"a": [expected, expected], "b": [expected]}
        assert any(thread.name.startswith("worker-of-test") for thread in threading.enumerate())
        on_workers.handle_event(EventType.END_RUN, fl_ctx)
        assert not any(thread.name.startswith("worker-of-test") for thread in threading.enumerate())
    with pytest.raises(ValueError, match="unknown executor 'cluster'"):
        LazyAggregator(executor="cluster")


def test_progress_of_an_aggregation(aggregator, result, fl_ctx):
    """The log of rounds has the progress of each pass, and of the optimizer's step, until the aggregation ends."""
    log, passes = RoundLog(None, lambda line: None), []
    log.start_round(0)
    note = log.on_aggregation_progress

    def on_progress(progress):
        note(progress)
        passes.append(log.running().aggregation)

    log.on_aggregation_progress = on_progress
    job_context.set_offload(fl_ctx, SimpleNamespace(round_log=log, memory_budget="64MiB"))
    mine = aggregator(rule="krum", rule_args={"num_byzantine": 1}, server_optimizer={"name": "fedadam", "lr": 0.01})
    for site in range(1, 6):
        mine.accept_model(result(f"site-{site}", a=[1.0, site], b=[3.0]))
    mine.aggregate_model()
    assert list(dict.fromkeys(progress.stage for progress in passes)) == ["pairwise distances", "krum", "fedadam"]
    assert max(progress.done for progress in passes if progress.stage == "krum") == 5 * 12
    assert log.running().aggregation is None


@pytest.mark.parametrize("rule", rule_names())
def test_every_rule_by_its_name(aggregator, result, tmp_path, rule):
    """The result of a round equals the result of the engine for the same contributions, to the bit."""
    sent = {f"site-{site}": {"a": torch.randn(2), "b": torch.randn(1)} for site in range(1, 8)}
    needed = {"clipped_mean": {"clip_norm": 1.0}}.get(rule, {})
    mine = aggregator(rule=rule, rule_args=needed)
    for client, tensors in sent.items():
        mine.accept_model(result(client, **tensors))
    reference = {"a": torch.zeros(2), "b": torch.zeros(1)}
    expected = nvflare_lazy.aggregate(
        sent, tmp_path / "expected.safetensors", {"name": rule, **needed}, reference=reference
    )
    assert values(mine.aggregate_model()) == {name: expected[name].tolist() for name in expected}


def give_to_scatter_and_gather(
    aggregator: LazyAggregator, fl_ctx: FLContext, client: str, model: FLModel, *, asked_in: int, claimed: str = ""
) -> bool:
    """Process a result as ScatterAndGather does, and return whether its aggregator accepts it."""
    shareable = FLModelUtils.to_shareable(model)
    shareable.add_cookie(AppConstants.CONTRIBUTION_ROUND, asked_in)
    receive_from(fl_ctx, client, shareable, claimed=claimed)
    return aggregator.accept(shareable, fl_ctx)


def test_results_for_scatter_and_gather(aggregator, result, fl_ctx, caplog):
    """A result is its sender's, whatever name it claims; one that is late or not usable is refused without an error."""
    mine = aggregator()
    send = functools.partial(give_to_scatter_and_gather, mine, fl_ctx)
    fl_ctx.set_prop(AppConstants.CURRENT_ROUND, 3)
    with caplog.at_level(logging.WARNING):
        assert not send("site-1", result("", a=[9.0, 9.0]), asked_in=2)
        assert send("site-1", result("", 1, a=[1.0, 1.0], b=[1.0]), asked_in=3, claimed="site-2")
        assert send("site-2", result("", 3, a=[5.0, 5.0], b=[5.0]), asked_in=3)
        assert not send("site-3", result("", a=[1.0, 1.0, 1.0]), asked_in=3)
    assert "ignored a late result of site-1 for round 2" in caplog.text
    assert "skipped the result of site-3:" in caplog.text
    found = from_shareable(mine.aggregate(fl_ctx)).data
    assert {name: value.tolist() for name, value in found.items()} == {"a": [4.0, 4.0], "b": [4.0]}
