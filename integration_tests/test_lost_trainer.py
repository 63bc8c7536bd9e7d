# SPDX-License-Identifier: Apache-2.0
"""Trainers in separate processes: one ends or hangs while its result is read, and costs only its own result.

A site that only hung comes back in the next round. A site whose trainer ended with an announced result leaves the job.
This is NVFlare's behavior, and in a deployment the report of a site ends the job for all.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nvflare_lazy
from benchmarks.fl_job import FLJob, RunResult
from benchmarks.fl_job.poc import Deployment, run_in_poc
from integration_tests.conftest import JobRunner, in_deployment, left_in, records, server_app
from integration_tests.expected import next_global, start, ulps
from nvflare_lazy.scratch import list_scratch
from tests.scratch.conftest import wait_until_empty

FAULTY = Path(__file__).parent / "faulty_trainer.py"
KILLED = Path(__file__).parent / "killed_trainer.py"


class JobThatDoesWithoutOne(FLJob):
    """NVFlare ends a job with fewer clients than its `min_clients`."""

    def write(self, folder: Path) -> Path:
        meta = super().write(folder) / "meta.json"
        meta.write_text(json.dumps({**json.loads(meta.read_text()), "min_clients": self.clients - 1}))
        return folder


def job(wait: int, kind: type[FLJob] = JobThatDoesWithoutOne, **more: Any) -> FLJob:
    described = {"model_mib": 1, "rounds": 2, "trainer": FAULTY, **more}
    return kind(
        mode="level-2",
        clients=3,
        tensors=4,
        external=True,
        controller_path="nvflare_lazy.flare.LazyFedAvg",
        controller={"min_responses": 2, "wait_time_after_min_received": wait},
        **described,
    )


def check(result: RunResult, scratch: Path, after: list[int]) -> None:
    first, second = records(result, "round")
    assert first["aggregated"] == ["site-1", "site-3"]
    assert first["skipped"].keys() == {"site-2"}
    print("left out of round 0: site-2,", first["skipped"]["site-2"])
    assert second["aggregated"] == [f"site-{site}" for site in after]
    value = next_global(start(1, result.job.elements), [1, 3]).astype("float32")
    saved = nvflare_lazy.open(server_app(result) / "FL_global_model.safetensors")
    assert ulps(saved["layer00001"].numpy(), next_global(value, after)) <= 1
    assert not left_in(scratch)


@pytest.mark.slow
def test_one_that_hangs_is_back_in_the_next_round(run_job: JobRunner):
    """It is silent in mid-upload for longer than a round waits: the round ends without it, the next one has it."""
    result = run_job(job(wait=8), environment={"FAULTS": '{"2": "pauses"}'})
    check(result, result.workspace.parent / "scratch", after=[1, 2, 3])


@pytest.mark.slow
def test_one_that_dies_is_done_without(run_job: JobRunner):
    """The job continues with the others at once; the log has the exit code."""
    result = run_job(job(wait=8), environment={"FAULTS": '{"2": "dies"}'})
    check(result, result.workspace.parent / "scratch", after=[1, 3])
    assert "rc=9" in records(result, "round")[0]["skipped"]["site-2"]


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


class JobOfTrainersForOneTask(JobThatDoesWithoutOne):
    """Its sites start a trainer for each task."""

    def client(self) -> dict[str, Any]:
        config = super().client()
        config["executors"][0]["executor"]["args"]["launch_once"] = False
        return config


@pytest.mark.slow
@pytest.mark.parametrize("kind", [JobThatDoesWithoutOne, JobOfTrainersForOneTask])
def test_one_that_is_killed_in_mid_download(run_job: JobRunner, tmp_path: Path, kind: type[FLJob]):
    """SIGKILL costs that site's round, and its scratch is free at once; a site that starts another one is back."""
    scratch, downloads, seen = tmp_path / "job1" / "scratch", tmp_path / "downloads", []
    downloads.mkdir()

    def look(_: Path) -> None:
        """Look who has scratch when the killed trainer has: the server and the other trainers run."""
        if len(os.listdir(downloads)) == 2 and not seen:
            wait_for(lambda: any(lease.alive is False for lease in list_scratch(scratch)), 2)
            wait_for(lambda: all(lease.alive for lease in list_scratch(scratch)), 120)
            seen.extend(list_scratch(scratch))

    # Files that are handed over are complete at once: such a transfer has no middle.
    segments = {"handoff": False}
    described = job(wait=30, kind=kind, model_mib=16, rounds=3, trainer=KILLED, offload=segments)
    result = run_job(described, environment={"DOWNLOADS": str(downloads)}, during=look)
    assert seen
    assert all(lease.alive for lease in seen)
    back = ["site-1", "site-2", "site-3"]
    without = ["site-1", "site-3"]
    assert [record["aggregated"] for record in records(result, "round")] == [
        back,
        without,
        without if kind is JobThatDoesWithoutOne else back,
    ]
    print("skipped in round 1: site-2,", records(result, "round")[1]["skipped"]["site-2"])
    wait_until_empty(scratch)


@in_deployment
@pytest.mark.slow
def test_a_site_that_dies_in_a_deployment_is_done_without(tmp_path: Path):
    """All processes of a site are killed in mid-upload, as when its machine is lost: the job ends with the others."""
    waits, environment = tmp_path / "waits", {"FAULTS": '{"2": "waits"}', "WAITS": str(tmp_path / "waits")}

    def kill_the_site(deployment: Deployment, _: str) -> None:
        if waits.exists():
            for pid, role in deployment.roles().items():
                if role.endswith("site-2"):
                    os.kill(pid, signal.SIGKILL)
            waits.unlink()

    # NVFlare calls a job finished when it has given up the site, after ten minutes without a heartbeat.
    result = run_in_poc(job(wait=8), tmp_path, environment=environment, during=kill_the_site, timeout=60)
    assert "Finished FedAvg" in result.server_log, result.output[-3000:]
    check(result, tmp_path / "scratch", after=[1, 3])
