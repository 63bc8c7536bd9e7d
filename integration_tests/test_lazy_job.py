# SPDX-License-Identifier: Apache-2.0
"""A job with our aggregator and persistor: the exact mean, the same bits every time, one bad client, a flat server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import nvflare_lazy
from benchmarks.fl_job import FLJob
from integration_tests.conftest import JobRunner, left_in, records, server_app
from integration_tests.expected import next_global, start, ulps
from nvflare_lazy.aggregation import METADATA_KEY
from nvflare_lazy.flare.job_context import PROVENANCE_KEY

FAULTY = Path(__file__).parent / "faulty_trainer.py"


@pytest.mark.parametrize(
    ("mode", "exchange", "difference", "external"),
    [
        ("level-2", "pytorch", False, False),
        pytest.param("level-3", "pytorch", True, False, marks=pytest.mark.slow),
        pytest.param("level-3", "pytorch", False, True, marks=pytest.mark.slow),
        pytest.param("level-2", "numpy", True, False, marks=pytest.mark.slow),
        pytest.param("level-2", "numpy", False, True, marks=pytest.mark.slow),
        pytest.param("level-3", "numpy", True, True, marks=pytest.mark.slow),
    ],
)
def test_the_model_is_the_exact_mean_rounded_once(run_job: JobRunner, mode, exchange, difference, external):
    """Within one unit in the last place of the exact weighted mean, in every form of exchange; nothing is left over."""
    job = FLJob(
        mode=mode, exchange=exchange, difference=difference, external=external, model_mib=1, tensors=4, rounds=2
    )
    result = run_job(job)
    saved = nvflare_lazy.open(server_app(result) / "FL_global_model.safetensors")
    assert list(saved) == [f"layer{index:05d}" for index in range(job.tensors)]
    for index in range(job.tensors):
        value = start(index, job.elements)
        for _ in range(job.rounds):
            exact = next_global(value, [1, 2], difference=difference)
            value = exact.astype(np.float32)
        assert ulps(saved[f"layer{index:05d}"].numpy(), exact) <= 1
    assert [record["aggregated"] for record in records(result, "round")] == [["site-1", "site-2"]] * 2
    provenance = {**json.loads(saved.metadata[PROVENANCE_KEY]), **json.loads(saved.metadata[METADATA_KEY])}
    assert (provenance["job"], provenance["round"]) == ("simulate_job", 1)
    assert provenance["contributors"] == ["site-1", "site-2"]
    assert not left_in(result.workspace.parent / "scratch")
    assert not left_in(server_app(result) / ".incoming")


def test_bad_clients_cost_only_themselves(run_job: JobRunner):
    """Garbage, a short item, a wrong shape, NaN, an unknown tensor: the round continues, the log has the reason."""
    faults = {"2": "garbage", "3": "shape", "4": "nan", "5": "stranger", "6": "truncated"}
    job = FLJob(mode="level-2", clients=6, model_mib=1, tensors=4, rounds=2, trainer=FAULTY)
    result = run_job(job, environment={"FAULTS": str(faults).replace("'", '"')})
    first, second = records(result, "round")
    assert first["aggregated"] == ["site-1"]
    reasons = first["skipped"]
    assert reasons.keys() == {f"site-{site}" for site in faults}
    assert "shape" in reasons["site-3"]
    assert "nan" in reasons["site-4"]
    assert "nobody.asked.for" in reasons["site-5"]
    assert second["aggregated"] == [f"site-{site}" for site in range(1, 7)]
    for site in faults:
        assert re.search(f"([Ss]kipped|Rejected) the result of site-{site}: ", result.server_log)
    value = next_global(start(1, job.elements), [1]).astype(np.float32)
    saved = nvflare_lazy.open(server_app(result) / "FL_global_model.safetensors")
    assert ulps(saved["layer00001"].numpy(), next_global(value, [1, 2, 3, 4, 5, 6])) <= 1


@pytest.mark.slow
def test_a_client_killed_while_it_sends_is_done_without(run_job: JobRunner):
    """With min_responses the round ends with the others, and so does the next; the log reports the missing result."""
    job = FLJob(
        mode="level-2",
        clients=3,
        model_mib=1,
        tensors=4,
        rounds=2,
        trainer=FAULTY,
        controller_path="nvflare_lazy.flare.LazyFedAvg",
        controller={"min_responses": 2, "wait_time_after_min_received": 4},
    )
    result = run_job(job, environment={"FAULTS": '{"3": "dies"}'})
    first, second = records(result, "round")
    assert first["aggregated"] == second["aggregated"] == ["site-1", "site-2"]
    assert "site-3" in first["skipped"]
    assert not left_in(result.workspace.parent / "scratch")


@pytest.mark.slow
def test_the_same_bits_whoever_comes_first(run_job: JobRunner):
    """Two runs of the same job, in which results arrive as they like, save the same file."""
    job = FLJob(mode="level-2", clients=4, model_mib=1, tensors=8, rounds=1, dtype="bfloat16")
    files = [(server_app(run_job(job)) / "FL_global_model.safetensors").read_bytes() for _ in range(2)]
    assert files[0] == files[1]
