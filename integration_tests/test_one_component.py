# SPDX-License-Identifier: Apache-2.0
"""One component in an existing job: stock controller, aggregation and persistor, and lazy tensors among them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.fl_job import FLJob
from integration_tests.conftest import JobRunner, left_in, records, server_app
from integration_tests.expected import next_global, start, ulps

SITES = [1, 2]
WITNESS = Path(__file__).parent / "witnesses" / "witness.py"


@pytest.mark.parametrize(
    ("exchange", "difference"), [pytest.param("pytorch", False, marks=pytest.mark.slow), ("numpy", True)]
)
def test_a_stock_job_with_the_component_gives_what_it_gives_without(run_job: JobRunner, exchange, difference):
    """Received values are lazy, on disk, and come to the right model; nothing is left of them afterwards."""
    job = FLJob(mode="level-1", exchange=exchange, difference=difference, model_mib=1, tensors=4, rounds=2)
    result = run_job(job)
    saved = torch.load(server_app(result) / "FL_global_model.pt")["model"]
    value = start(2, job.elements)
    for _ in range(job.rounds):
        # Stock aggregation works in float32, in the order of arrival.
        exact = next_global(value, SITES, difference=difference)
        value = exact.astype(np.float32)
    assert ulps(saved["layer00002"].numpy(), exact) < 8
    contributions = records(result, "contribution")
    assert len(contributions) == job.clients * job.rounds
    assert all(record["on_disk"] and record["accepted"] for record in contributions)
    assert not left_in(result.workspace.parent / "scratch")


@pytest.mark.slow
@pytest.mark.parametrize(
    "controller",
    [pytest.param({}, id="stock"), pytest.param({"aggregator": {"path": "witness.PlainAggregator"}}, id="custom")],
)
def test_one_bad_client_costs_only_itself_with_others_aggregators(run_job: JobRunner, controller: dict):
    """Results with garbage or a wrong shape are skipped, with the reason; the next round has all clients again."""
    job = FLJob(
        mode="level-1",
        clients=4,
        model_mib=1,
        tensors=4,
        rounds=2,
        trainer=Path(__file__).parent / "faulty_trainer.py",
        controller=controller,
        files=(WITNESS,),
    )
    result = run_job(job, environment={"FAULTS": '{"2": "garbage", "3": "shape"}'})
    first, second = records(result, "round")
    assert first["aggregated"] == ["site-1", "site-4"]
    assert "layer" in first["skipped"]["site-3"]
    assert first["skipped"].keys() == {"site-2", "site-3"}
    assert second["aggregated"] == ["site-1", "site-2", "site-3", "site-4"]
    saved = torch.load(server_app(result) / "FL_global_model.pt")["model"]
    value = next_global(start(2, job.elements), [1, 4]).astype(np.float32)
    assert ulps(saved["layer00002"].numpy(), next_global(value, [1, 2, 3, 4])) < 8
    assert not left_in(result.workspace.parent / "scratch")
