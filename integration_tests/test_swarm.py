# SPDX-License-Identifier: Apache-2.0
"""Swarm learning, with NVFlare's recipe and `TensorOffload`, and with ours: the models, the records and the scratch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper

import nvflare_lazy
from benchmarks.fl_job import MIB, RunResult
from benchmarks.fl_job.poc import run_in_poc
from benchmarks.fl_job.swarm_job import SwarmJob
from benchmarks.fl_job.synthetic_model import step
from integration_tests.conftest import JobRunner, in_deployment, left_in
from integration_tests.expected import next_global, start, ulps
from nvflare_lazy.flare.result_models import MANIFEST_NAME
from nvflare_lazy.records import FILE_NAME

COMPONENTS = Path(__file__).parent / "swarm" / "rotation.py"
ROTATION: dict[str, Any] = {
    "components": ({"id": "rotation", "path": "rotation.Rotation"},),
    "files": (COMPONENTS,),
}


def app_of(result: RunResult, site: int) -> Path:
    """Return the folder of the models of a client."""
    return result.workspace / f"site-{site}" / "simulate_job" / f"app_site-{site}"


def records(result: RunResult, kind: str) -> dict[int, list[dict[str, Any]]]:
    """Return the records of one kind by the number of the site that wrote them."""
    found = {}
    for path in sorted(result.workspace.glob(f"site-*/simulate_job/{FILE_NAME}")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        chosen = [line for line in lines if line["kind"] == kind]
        if chosen:
            found[int(path.parts[-3].partition("-")[2])] = chosen
    return found


def aggregators(result: RunResult) -> list[int]:
    """Return the site that aggregated each round."""
    rounds = {record["round"]: site for site, found in records(result, "round").items() for record in found}
    return [rounds[number] for number in sorted(rounds)]


def final_models(result: RunResult, job: SwarmJob, name: str = "FL_global_model") -> Iterator[dict[str, Any]]:
    """Yield a model of every client."""
    for site in range(1, job.clients + 1):
        app = app_of(result, site)
        if job.mode == "level-2":
            yield dict(nvflare_lazy.open(app / f"{name}.safetensors"))
        else:
            yield torch.load(app / f"{name}.pt")["model"]


def stock_mean(value: torch.Tensor, sites: list[int]) -> torch.Tensor:
    """Return what NVFlare's aggregation makes of a round, with the results in this order."""
    helper = WeightedAggregationHelper()
    for site in sites:
        helper.add({"w": step(value, site)}, weight=site, contributor_name=f"site-{site}", contribution_round=0)
    return torch.as_tensor(helper.get_result()["w"])


def check_records(result: RunResult, job: SwarmJob) -> None:
    """Check that each round is told once, by the client that aggregated it, and nothing by the others."""
    sites = [f"site-{site}" for site in range(1, job.clients + 1)]
    rounds = sorted(
        (record["round"], *record["aggregated"]) for found in records(result, "round").values() for record in found
    )
    assert rounds == [(number, *sites) for number in range(job.rounds)]
    for found in records(result, "contribution").values():
        for record in found:
            assert (record["nbytes"], record["tensors"]) == (job.model_mib * MIB, job.tensors)
            assert record["accepted"]
    for site, found in records(result, "contribution").items():
        # An in-process trainer has its result in the memory of its client.
        own = f"site-{site}" if not job.external else None
        assert all(record["on_disk"] == (record["client"] != own) for record in found)
    logs = [path.read_text() for path in result.workspace.glob("*/log.txt")]
    assert sum(log.count("finished in") for log in logs) == job.rounds
    assert not any("Round None" in log or "simulator_server (" in log for log in logs)


def check(result: RunResult, job: SwarmJob) -> None:
    """Check models, records and scratch of a job in which all clients take part."""
    sites = list(range(1, job.clients + 1))
    value = torch.from_numpy(start(2, job.elements))
    for _ in range(job.rounds):
        exact = next_global(value.numpy(), sites)
        value = torch.from_numpy(exact.astype(np.float32)) if job.mode == "level-2" else stock_mean(value, sites)
    for model in final_models(result, job):
        if job.mode == "level-2":
            assert ulps(model["layer00002"].numpy(), exact) <= 1
        elif job.clients == 2:
            # With more clients, NVFlare's result depends on the order of arrival.
            assert torch.equal(model["layer00002"], value)
        else:
            assert ulps(model["layer00002"].numpy(), value.numpy().astype(np.longdouble)) < 16
    for app in (app_of(result, site) for site in sites if job.mode == "level-2"):
        # Each model once, and the manifest of a result.
        models = json.loads((app.parent / MANIFEST_NAME).read_text())["artifacts"]
        assert models["global_model"] == f"{app.name}/FL_global_model.safetensors"
        assert len(list(app.rglob("*.safetensors"))) == len(set(models.values()))
    for model in final_models(result, job, "best_FL_global_model"):
        assert model.keys() == {f"layer{index:05d}" for index in range(job.tensors)}
    check_records(result, job)
    assert not left_in(result.workspace.parent / "scratch")


@pytest.mark.parametrize("mode", [pytest.param("level-1", marks=pytest.mark.slow), "level-2"])
def test_swarm_in_process(run_job: JobRunner, mode: str):
    """At level 1 the model equals NVFlare's, at level 2 the exact mean; both leave nothing in scratch."""
    job = SwarmJob(mode=mode, clients=2, model_mib=1, tensors=4, rounds=2)
    check(run_job(job), job)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["pytorch", "numpy"])
def test_level_1_gives_the_bits_of_nvflare(run_job: JobRunner, exchange: str):
    """A job without this package and one with it at level 1, both from NVFlare's recipe: equal models."""
    arguments = {"clients": 2, "model_mib": 1, "tensors": 4, "rounds": 2, "exchange": exchange}
    models = []
    for mode in ("stock", "level-1"):
        job = SwarmJob(mode=mode, **arguments)
        result = run_job(job)
        models.append([dict(model) for model in final_models(result, job)])
    for stock, lazy in zip(*models, strict=True):
        assert stock.keys() == lazy.keys()
        assert all(torch.equal(torch.as_tensor(stock[name]), torch.as_tensor(lazy[name])) for name in stock)
    check_records(result, job)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["level-1", "level-2"])
@pytest.mark.parametrize("external", [False, True], ids=["in process", "external"])
def test_the_clients_take_turns(run_job: JobRunner, mode: str, external: bool):
    """Each of three clients aggregates a round, and the first one another; the contributors are known by name."""
    job = SwarmJob(mode=mode, clients=3, model_mib=1, tensors=4, rounds=4, external=external, **ROTATION)
    result = run_job(job)
    check(result, job)
    turns = aggregators(result)
    assert turns == [(turns[0] - 1 + number) % 3 + 1 for number in range(4)]


@pytest.mark.slow
def test_differences(run_job: JobRunner):
    """Clients send differences; the client that aggregates adds them to the global model, on disk."""
    job = SwarmJob(mode="level-2", clients=2, model_mib=1, tensors=4, rounds=2, difference=True, **ROTATION)
    result = run_job(job)
    value = start(2, job.elements)
    for _ in range(job.rounds):
        exact = next_global(value, [1, 2], difference=True)
        value = exact.astype(np.float32)
    for model in final_models(result, job):
        assert ulps(model["layer00002"].numpy(), exact) <= 1
    assert not left_in(result.workspace.parent / "scratch")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["level-1", "level-2"])
def test_a_bad_result_costs_one_contribution(run_job: JobRunner, mode: str):
    """NaN, an unknown name and a wrong shape are skipped by the client that aggregates, each with its reason."""
    faults = {"2": "nan", "3": "shape", "4": "stranger"} if mode == "level-2" else {"2": "shape", "3": "stranger"}
    sites = len(faults) + 2
    job = SwarmJob(
        mode=mode,
        clients=sites,
        model_mib=1,
        tensors=4,
        rounds=2,
        trainer=COMPONENTS.parents[1] / "faulty_trainer.py",
        recipe={"server_config_overrides": {"aggr_clients": ["site-1"], "starting_client": "site-1"}},
    )
    result = run_job(job, environment={"FAULTS": json.dumps(faults)})
    first, second = records(result, "round")[1]
    assert first["aggregated"] == ["site-1", f"site-{sites}"]
    reasons = {"nan": "nan", "shape": "has shape", "stranger": "the global model has no"}
    for site, fault in faults.items():
        assert reasons[fault] in first["skipped"][f"site-{site}"].lower()
    assert second["aggregated"] == [f"site-{site}" for site in range(1, sites + 1)]
    value = next_global(start(2, job.elements), [1, sites]).astype(np.float32)
    exact = next_global(value, list(range(1, sites + 1)))
    for model in final_models(result, job):
        assert model.keys() == {f"layer{index:05d}" for index in range(job.tensors)}
        assert ulps(model["layer00002"].numpy(), exact) < 16
    assert not left_in(result.workspace.parent / "scratch")


@pytest.mark.slow
@pytest.mark.parametrize("external", [False, True], ids=["in process", "external"])
def test_an_aborted_job_leaves_nothing_in_scratch(run_job: JobRunner, external: bool):
    """The job ends in its second round, with results in the scratch of the client that aggregates."""
    job = SwarmJob(
        mode="level-2",
        clients=3,
        model_mib=4,
        tensors=4,
        rounds=3,
        external=external,
        components=({"id": "panic", "path": "rotation.Panic"},),
        files=(COMPONENTS,),
    )
    result = run_job(job, may_fail=True)
    assert any("the test ends the job" in path.read_text() for path in result.workspace.glob("*/log.txt"))
    rounds = [record["round"] for found in records(result, "round").values() for record in found]
    assert 0 in rounds
    assert 2 not in rounds
    assert not left_in(result.workspace.parent / "scratch")


@pytest.mark.slow
def test_cross_site_evaluation(run_job: JobRunner, tmp_path: Path):
    """As NVFlare's recipe offers it: every model of every client is evaluated by all, from disk."""
    job = SwarmJob(
        mode="level-2",
        clients=2,
        model_mib=1,
        tensors=4,
        rounds=2,
        trainer=COMPONENTS.parent / "evaluating_trainer.py",
        recipe={"do_cross_site_eval": True},
    )
    result = run_job(job)
    results = result.server_run_dir / "cross_site_val" / "result_shareables"
    models = ("site-1", "site-2", "GLOBAL_FL_global_model.safetensors", "GLOBAL_best_FL_global_model.safetensors")
    assert {path.name for path in results.iterdir()} == {f"site-{site}-{model}" for site in (1, 2) for model in models}
    check_records(result, job)
    assert not left_in(result.workspace.parent / "scratch")


@pytest.mark.slow
@in_deployment
def test_swarm_in_a_deployment(tmp_path: Path):
    """A server and three sites with external trainers: models, records and scratch as in the simulator."""
    job = SwarmJob(mode="level-2", clients=3, model_mib=4, tensors=4, rounds=3, external=True)
    result = run_in_poc(job, tmp_path)
    assert result.ok, result.output[-3000:]
    value = start(2, job.elements)
    for _ in range(job.rounds):
        exact = next_global(value, [1, 2, 3])
        value = exact.astype(np.float32)
    sites = ["site-1", "site-2", "site-3"]
    for site in sites:
        (model,) = result.workspace.glob(f"{site}/*/app_{site}/FL_global_model.safetensors")
        assert ulps(nvflare_lazy.open(model)["layer00002"].numpy(), exact) <= 1
    logs = result.workspace.glob(f"site-*/*/{FILE_NAME}")
    lines = [json.loads(line) for path in logs for line in path.read_text().splitlines()]
    rounds = {line["round"]: line["aggregated"] for line in lines if line["kind"] == "round"}
    assert rounds == {0: sites, 1: sites, 2: sites}
    assert all(line["on_disk"] and line["nbytes"] == 4 * MIB for line in lines if line["kind"] == "contribution")
    assert not left_in(tmp_path / "scratch")
