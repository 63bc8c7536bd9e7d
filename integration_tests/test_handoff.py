# SPDX-License-Identifier: Apache-2.0
"""A job on one host: all models and results are handed over as files, and the model is the same as in any other job."""

from __future__ import annotations

import time

import numpy as np
import pytest

import nvflare_lazy
from benchmarks.fl_job import MIB, FLJob, run
from integration_tests.conftest import in_deployment, left_in, records, server_app
from integration_tests.expected import next_global, start, ulps

MODEL_MIB, CLIENTS, ROUNDS = 16, 2, 3


@in_deployment
@pytest.mark.parametrize("env", ["sim", pytest.param("poc", marks=pytest.mark.slow)])
def test_everything_is_handed_over(tmp_path, env):
    """No result arrives in any other way, and a round writes one model for each client and one for the server."""
    job = FLJob(mode="level-3", clients=CLIENTS, model_mib=MODEL_MIB, tensors=4, rounds=ROUNDS, external=env == "poc")
    result = run(job, tmp_path, env=env)
    assert result.ok, result.output[-5000:]
    for record in records(result, "round"):
        assert record["transport"] == {"by handoff": CLIENTS * MODEL_MIB * MIB}
        assert record["aggregated"] == ["site-1", "site-2"]
    assert "in segments" not in result.output
    # The model that the job starts with is counted in the first round.
    assert result.written_per_round <= (CLIENTS + 1 + CLIENTS / ROUNDS) * MODEL_MIB * MIB + 4 * MIB
    saved = nvflare_lazy.open(server_app(result) / "FL_global_model.safetensors")
    for index in range(job.tensors):
        value = start(index, job.elements)
        for _ in range(ROUNDS):
            exact = next_global(value, [1, 2])
            value = exact.astype(np.float32)
        assert ulps(saved[f"layer{index:05d}"].numpy(), exact) <= 1
    deadline = time.monotonic() + 60
    while left := left_in(tmp_path / "scratch"):  # the last process of a deployment ends after the job
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
