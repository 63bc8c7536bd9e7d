# SPDX-License-Identifier: Apache-2.0
"""One component in an existing job: stock controller, aggregation and persistor, and lazy tensors among them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.fl_job import FLJob
from integration_tests.conftest import JobRunner, left_in, records, server_app
from integration_tests.expected import next_global, start, ulps

SITES = [1, 2]


@pytest.mark.parametrize(("exchange", "difference"), [("pytorch", False), ("numpy", True)])
def test_a_stock_job_with_the_component_gives_what_it_gives_without(run_job: JobRunner, exchange, difference):
    """Received values are lazy, on disk, and come to the right model; nothing is left of them afterwards."""
    job = FLJob(mode="component", exchange=exchange, difference=difference, model_mib=1, tensors=4, rounds=2)
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
