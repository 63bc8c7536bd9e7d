# SPDX-License-Identifier: Apache-2.0
"""`nvflare_lazy.install()` in a training script.

A trainer that loads the global model tensor by tensor needs no second model, neither to receive nor to send.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import nvflare_lazy
from benchmarks.fl_job import MIB, FLJob, RunResult
from integration_tests.conftest import JobRunner, server_app
from integration_tests.expected import next_global, start, ulps
from tests.scratch.conftest import wait_until_empty

HERE = Path(__file__).parent
TRAINER = HERE / "measured_trainer.py"
MODEL_MIB = 256


class JobOfKilledTrainers(FLJob):
    """The clients do not wait long for their trainers to end."""

    def client(self) -> dict[str, Any]:
        config = super().client()
        config["executors"][0]["executor"]["args"] |= {"shutdown_timeout": 0.2, "stop_grace_period": 0.5}
        return config


class JobWithOneLineInTheScript(FLJob):
    """The clients' configurations do not mention this package; their script calls `install()`."""

    def client(self) -> dict[str, Any]:
        config = super().client()
        config["executors"][0]["executor"]["args"]["task_script_args"] = "--install"
        return config


def environment(job: FLJob, seen: Path) -> dict[str, str]:
    return {"WITNESS": str(seen), "SIZES": json.dumps([job.tensors, job.elements])}


def notes(seen: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in seen.read_text().splitlines()]


def check(result: RunResult, tensors: Any) -> None:
    value = start(5, result.job.elements)
    for _ in range(result.job.rounds):
        exact = next_global(value, [1, 2])
        value = exact.astype("float32")
    assert ulps(tensors["layer00005"].numpy(), exact) <= (1 if result.job.mode in ("level-2", "level-3") else 8)


@pytest.mark.slow
def test_a_trainer_needs_no_second_model(run_job: JobRunner, tmp_path: Path):
    """With one line in the script, exchanging 256 MiB takes less than half of that in addition to the model.

    When the job is complete, NVFlare ends the one trainer by SIGTERM, and the other, or its own watch does, by SIGKILL:
    nothing is left.
    """
    seen = tmp_path / "witness.jsonl"
    job = JobOfKilledTrainers(mode="level-3", model_mib=MODEL_MIB, tensors=32, rounds=1, external=True, trainer=TRAINER)
    result = run_job(job, environment={"LINGER": "", **environment(job, seen)})
    assert "terminating trainer process group" in result.output
    wait_until_empty(result.workspace.parent / "scratch")
    assert [note["types"] for note in notes(seen)] == [["LazyTensor"]] * job.clients * job.rounds
    most = max(note["beside the model"] for note in notes(seen))
    print(f"receiving and sending {MODEL_MIB} MiB takes a trainer {most / MIB:.0f} MiB at most beside its model")
    assert most < MODEL_MIB / 2 * MIB
    check(result, nvflare_lazy.open(server_app(result) / "FL_global_model.safetensors"))


@pytest.mark.slow
def test_a_script_in_the_clients_process_says_it_for_the_process(run_job: JobRunner, tmp_path: Path):
    """The client has no component: from the second round at the latest, the script gets lazy tensors."""
    seen = tmp_path / "witness.jsonl"
    job = JobWithOneLineInTheScript(mode="level-2", model_mib=1, tensors=8, rounds=3, trainer=TRAINER)
    result = run_job(job, environment=environment(job, seen))
    assert [note["types"] for note in notes(seen)[job.clients :]] == [["LazyTensor"]] * job.clients * 2
    check(result, nvflare_lazy.open(server_app(result) / "FL_global_model.safetensors"))
    # The simulator ends its clients' processes by a signal.
    wait_until_empty(result.workspace.parent / "scratch")
