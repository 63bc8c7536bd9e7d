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
from benchmarks.fl_job.swarm_job import SwarmJob
from benchmarks.fl_job.synthetic_model import step
from integration_tests.conftest import JobRunner, left_in
from integration_tests.expected import next_global, start, ulps
from nvflare_lazy.flare.round_log import FILE_NAME

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
        # An in-process trainer has its result in the memory of its own client.
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
    for model in final_models(result, job, "best_FL_global_model"):
        assert model.keys() == {f"layer{index:05d}" for index in range(job.tensors)}
    check_records(result, job)
    assert not left_in(result.workspace.parent / "scratch")


@pytest.mark.parametrize("mode", ["level-1", "level-2"])
def test_swarm_in_process(run_job: JobRunner, mode: str):
    """The bits of NVFlare's aggregation at level 1, the exact mean at level 2; both leave nothing in scratch."""
    job = SwarmJob(mode=mode, clients=2, model_mib=1, tensors=4, rounds=2)
    check(run_job(job), job)
