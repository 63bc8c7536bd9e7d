# SPDX-License-Identifier: Apache-2.0
"""A tree of aggregators: its model against exact arithmetic over all clients, and against NVFlare's own aggregators."""

from __future__ import annotations

import random
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ProcessType, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.aggregators.intime_accumulate_model_aggregator import InTimeAccumulateWeightedAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.edge.controllers.sage import ScatterAndGatherForEdge
from nvflare.edge.executors.hug import HierarchicalUpdateGatherer

from nvflare_lazy.flare import LazyAggregator
from nvflare_lazy.flare.subtree import SUBTREE_KEY
from tests.flare.conftest import Engine, give

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ELEMENTS = 6
ROUND = 0


class Node:
    """An aggregator with the context of a server, or of a client in the middle of a tree."""

    def __init__(self, name: str, aggregator, *, middle: bool, model: dict[str, torch.Tensor], tree: bool) -> None:
        self.name = name
        self.aggregator = aggregator
        self.engine = Engine()
        self.fl_ctx = FLContext()
        self.fl_ctx.set_prop(ReservedKey.ENGINE, self.engine)
        self.fl_ctx.set_prop(AppConstants.CURRENT_ROUND, ROUND)
        if middle:
            gatherer = HierarchicalUpdateGatherer("", "updater", 1.0)
            router = SimpleNamespace(task_table={"train": gatherer})
            self.fl_ctx.set_prop(FLContextKey.RUNNER, SimpleNamespace(task_router=router))
            self.fl_ctx.set_prop(ReservedKey.PROCESS_TYPE, ProcessType.CLIENT_JOB)
            self.fl_ctx.set_prop(ReservedKey.IS_LEAF, False)
        else:
            give(self.fl_ctx, **model)
            if tree:
                workflow = SimpleNamespace(controller=ScatterAndGatherForEdge("assessor"))
                self.fl_ctx.set_prop(FLContextKey.RUNNER, SimpleNamespace(current_wf=workflow))
        aggregator.handle_event(EventType.START_RUN, self.fl_ctx)
        self.fl_ctx.set_prop(FLContextKey.TASK_DATA, DXO(DataKind.WEIGHTS, data=dict(model)).to_shareable())
        aggregator.handle_event(EventType.BEFORE_TASK_EXECUTION, self.fl_ctx)

    def accept(self, child: str, result: Shareable) -> bool:
        peer = FLContext()
        peer.set_prop(ReservedKey.IDENTITY_NAME, child, private=False)
        self.fl_ctx.set_peer_context(peer)
        result.set_peer_props(peer.get_all_public_props())
        result.add_cookie(AppConstants.CONTRIBUTION_ROUND, ROUND)
        return self.aggregator.accept(result, self.fl_ctx)

    def aggregate(self) -> Shareable | None:
        return self.aggregator.aggregate(self.fl_ctx)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: torch.as_tensor(value) for name, value in from_shareable(self.aggregate()).data.items()}


@pytest.fixture
def node(scratch):
    """Maker of the nodes of a tree."""

    def make(name="top", *, aggregator=None, middle=False, model=None, tree=True, **arguments) -> Node:
        model = model or {"a": torch.zeros(2)}
        return Node(name, aggregator or LazyAggregator(**arguments), middle=middle, model=model, tree=tree)

    return make


def client(steps=None, kind=DataKind.WEIGHTS, subtree=None, **tensors) -> Shareable:
    data = {name: value if torch.is_tensor(value) else torch.tensor(value) for name, value in tensors.items()}
    meta = {} if steps is None else {MetaKey.NUM_STEPS_CURRENT_ROUND: steps}
    if subtree is not None:
        meta[SUBTREE_KEY] = subtree
    return DXO(kind, data=data, meta=meta).to_shareable()


def stock(kind=DataKind.WEIGHTS) -> InTimeAccumulateWeightedAggregator:
    return InTimeAccumulateWeightedAggregator(expected_data_kind=kind)


def exact_mean(holders: list[tuple[Fraction, torch.Tensor]], index: int) -> tuple[Fraction, Fraction]:
    """Return the mean of an element over the clients that have its tensor, and the mean of its absolute values."""
    total = sum(weight for weight, _ in holders)
    values = [(weight, Fraction(tensor.double()[index].item())) for weight, tensor in holders]
    mean = sum((weight * value for weight, value in values), Fraction(0)) / total
    return mean, sum((weight * abs(value) for weight, value in values), Fraction(0)) / total


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_tree_gives_the_mean_of_all_its_clients(node, dtype, seed):
    """The error is at most one rounding for each level, for any tree, weights and subsets of tensors."""
    draw, generator = random.Random(f"{seed}{dtype}"), torch.Generator().manual_seed(seed)
    names = ("a", "b", "c")
    model = {name: torch.zeros(ELEMENTS, dtype=dtype) for name in names}
    clients: list[tuple[int, dict[str, torch.Tensor]]] = []

    def grow(depth: int, parent: Node) -> int:
        """Add children to a node, and return the number of levels of aggregation."""
        levels = 1
        for number in range(draw.randint(2, 4)):
            name = f"{parent.name}-{number}"
            if depth == 0 or draw.random() < 0.3:
                steps = draw.choice([1, 3, 17, 1000, 123457])
                held = names if draw.random() < 0.5 else draw.sample(names, 2)
                tensors = {key: (torch.randn(ELEMENTS, generator=generator) * 100).to(dtype) for key in held}
                clients.append((steps, tensors))
                assert parent.accept(name, client(steps, **tensors))
                continue
            below = node(name, middle=True, model=model)
            for _ in range(draw.choice([1, 1, 2])):
                # A node passes the results of its clients upward when it has some, so in several parts.
                levels = max(levels, 1 + grow(depth - 1, below))
                assert parent.accept(name, below.aggregate())
        return levels

    top = node(model=model)
    levels = grow(2, top)
    found = top.tensors()
    for name in names:
        holders = [(Fraction(steps), tensors[name]) for steps, tensors in clients if name in tensors]
        for index in range(ELEMENTS):
            mean, size = exact_mean(holders, index)
            # 2^-50 covers the arithmetic in float64, which counts for results in float64 only.
            bound = size * ((1 + Fraction(UNIT[dtype])) ** levels - 1 + Fraction(levels, 2**50))
            assert abs(Fraction(found[name].double()[index].item()) - mean) <= bound


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_in_the_middle_below_nvflare(node, kind):
    """NVFlare's aggregator at the top uses the sum of the weights, and gets differences as differences."""
    middle = node("mid", middle=True, aggregation_weights={"site-2": 2.0})
    assert middle.accept("site-1", client(1, kind, a=[0.0, 8.0]))
    assert middle.accept("site-2", client(3, kind, a=[7.0, 1.0]))
    passed = middle.aggregate()
    assert from_shareable(passed).data_kind == kind
    assert from_shareable(passed).get_meta_prop(MetaKey.NUM_STEPS_CURRENT_ROUND) == 7
    top = node(aggregator=stock(kind))
    assert top.accept("mid", passed)
    assert top.accept("site-3", client(7, kind, a=[2.0, 4.0]))
    assert top.tensors()["a"].tolist() == [(6 * 7 + 7 * 2) / 14, (8 + 6 + 7 * 4) / 14]


def test_nvflare_in_the_middle_passes_no_weight(node):
    """Its aggregate counts as one step, as in NVFlare; `aggregation_weights` of the top gives it another weight."""
    for weights, expected in (({}, (6.0 + 7 * 2) / 8), ({"mid": 7.0}, (7 * 6.0 + 7 * 2) / 14)):
        middle = node("mid", middle=True, aggregator=stock())
        assert middle.accept("site-1", client(1, a=[0.0, 0.0]))
        assert middle.accept("site-2", client(6, a=[7.0, 7.0]))
        top = node(aggregation_weights=weights)
        assert top.accept("mid", middle.aggregate())
        assert top.accept("site-3", client(7, a=[2.0, 2.0]))
        assert top.tensors()["a"].tolist() == [expected, expected]


def test_differences_are_added_once_at_the_top(node):
    model = {"a": torch.tensor([10.0, 20.0])}
    top, middle = node(model=model), node("mid", middle=True, model=model)
    middle.accept("site-1", client(1, DataKind.WEIGHT_DIFF, a=[1.0, 2.0]))
    middle.accept("site-2", client(1, DataKind.WEIGHT_DIFF, a=[3.0, 4.0]))
    assert top.accept("mid", middle.aggregate())
    assert top.tensors()["a"].tolist() == [12.0, 23.0]


def test_a_result_that_does_not_match_the_model_is_skipped_in_the_middle(node):
    """The task has the global model, so results of a subtree are checked as on the server."""
    middle = node("mid", middle=True)
    assert not middle.accept("site-1", client(1, a=[1.0, 2.0, 3.0]))
    assert not middle.accept("site-2", client(1, b=[1.0, 2.0]))
    assert middle.accept("site-3", client(5, a=[1.0, 2.0]))
    passed = from_shareable(middle.aggregate())
    assert passed.get_meta_prop(MetaKey.NUM_STEPS_CURRENT_ROUND) == 5
    assert passed.get_meta_prop(SUBTREE_KEY) == {"results": 1, "tensor_weights": {}}


@pytest.mark.parametrize("on_too_few", ["fail", "skip"])
def test_a_subtree_with_too_few_results_passes_nothing(node, on_too_few, caplog):
    """The rest of the tree continues; the message names the subtree's round."""
    middle = node("mid", middle=True, min_results=2, on_too_few=on_too_few)
    middle.accept("site-1", client(1, a=[1.0, 2.0]))
    assert middle.aggregate() is None
    assert "1 usable results, and min_results is 2; nothing is passed upward" in caplog.text


def test_results_of_subtrees_count_for_min_results(node):
    top, middle = node(min_results=3), node("mid", middle=True)
    for number in (1, 2):
        middle.accept(f"site-{number}", client(1, a=[1.0, 2.0]))
    top.accept("mid", middle.aggregate())
    top.accept("site-3", client(1, a=[1.0, 2.0]))
    assert top.tensors()["a"].tolist() == [1.0, 2.0]


def test_an_aggregate_of_which_one_tensor_cannot_be_used_is_skipped_whole(node):
    """Although its tensors have different weights, and are separate contributions for the engine."""
    model = {"a": torch.zeros(1), "b": torch.zeros(1)}
    top = node(model=model)
    statement = {"results": 2, "tensor_weights": {"b": 1.0}}
    assert top.accept("mid", client(4, subtree=statement, a=[5.0], b=[float("nan")]))
    assert top.accept("site-3", client(1, a=[1.0], b=[2.0]))
    assert {name: value.tolist() for name, value in top.tensors().items()} == {"a": [1.0], "b": [2.0]}


@pytest.mark.parametrize(
    "statement",
    [
        7,
        {"results": 0},
        {"results": True},
        {"results": 2.0},
        {"results": 1, "more": 1},
        {"results": 1, "tensor_weights": []},
        {"results": 1, "tensor_weights": {"b": 1.0}},
        {"results": 1, "tensor_weights": {"a": 0.0}},
        {"results": 1, "tensor_weights": {"a": float("nan")}},
        {"results": 1, "tensor_weights": {"a": 1e13}},
        {"results": 1, "tensor_weights": {"a": "1"}},
    ],
)
def test_forged_statements(node, statement):
    """A statement that is not valid costs the result of its sender."""
    top = node()
    assert not top.accept("mid", client(1, subtree=statement, a=[5.0, 5.0]))
    assert top.accept("site-3", client(1, a=[1.0, 2.0]))
    assert top.tensors()["a"].tolist() == [1.0, 2.0]


def test_a_client_of_a_job_without_a_tree_is_no_subtree(node):
    """It would count as many clients, and as several contributions."""
    top = node(tree=False, min_results=2)
    assert not top.accept("site-1", client(1, subtree={"results": 1000}, a=[1.0, 2.0]))
    assert top.accept("site-2", client(1, a=[3.0, 4.0]))


def test_clients_and_robust_rules_get_one_result_of_each(node):
    """A second result of a client is ignored; for a robust rule, parts would be further votes of one sender."""
    for arguments, statement in (({}, None), ({"rule": "median"}, {"results": 1})):
        top = node(**arguments)
        assert top.accept("site-1", client(1, subtree=statement, a=[1.0, 2.0]))
        assert not top.accept("site-1", client(1, subtree=statement, a=[3.0, 4.0]))
        assert top.tensors()["a"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("rule", "warnings"), [("median", 1), ("mean", 0)])
def test_robust_rules_in_a_tree_are_not_those_of_its_clients(node, caplog, rule, warnings):
    middle = node("mid", middle=True, rule=rule)
    for _ in range(2):
        middle.accept("site-1", client(1, a=[1.0, 2.0]))
        middle.aggregate()
    assert sum("sees the aggregates of subtrees" in line.getMessage() for line in caplog.records) == warnings


def test_a_server_optimizer_in_the_middle_ends_the_job(node):
    middle = node("mid", middle=True, server_optimizer={"name": "fedadam", "lr": 0.1})
    assert len(middle.engine.panics) == 1
    assert "server_optimizer updates the global model, which only the server does" in middle.engine.panics[0]
