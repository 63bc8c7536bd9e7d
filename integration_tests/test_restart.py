# SPDX-License-Identifier: Apache-2.0
"""A server that is killed, or whose disk is full: the checkpoint is whole, and the next start goes on from it."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

import nvflare_lazy
from benchmarks.fl_job import FLJob
from benchmarks.fl_job.sampling import descendants
from integration_tests.conftest import JobRunner, left_in
from integration_tests.expected import next_global, start, ulps
from nvflare_lazy.flare.checkpoint_store import CheckpointStore
from nvflare_lazy.flare.lazy_model_persistor import BEST_NAME, MODEL_NAME
from nvflare_lazy.scratch import list_scratch, reclaim

ROUNDS = 3


def job_in(checkpoints: Path, rounds: int = ROUNDS, **more: object) -> FLJob:
    return FLJob(
        mode="lazy",
        model_mib=16,
        tensors=8,
        rounds=rounds,
        controller_path="nvflare_lazy.flare.LazyFedAvg",
        persistor={"checkpoint_dir": str(checkpoints)},
        **more,
    )


class Killer:
    """Kills the server, and what is below it, some seconds after its first round began."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began: float | None = None

    def __call__(self, workspace: Path) -> None:
        log = workspace / "server" / "log.txt"
        if self._began is None:
            if log.exists() and "return task to client" in log.read_text():
                self._began = time.monotonic()
            return
        if time.monotonic() - self._began < self._seconds:
            return
        pids = [pid for pid, command in descendants(os.getpid()) if str(workspace) in command]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def check(checkpoints: Path) -> int | None:
    """Check that the checkpoint is whole and what its round must have come to; return the round."""
    last = CheckpointStore(checkpoints, MODEL_NAME, BEST_NAME).latest()
    if last is None:
        return None
    job = job_in(checkpoints)
    tensors = nvflare_lazy.open(last.path)
    assert len(tensors) == job.tensors
    value = start(3, job.elements)
    for _ in range(last.round + 1):
        exact = next_global(value, [1, 2])
        value = exact.astype("float32")
    assert ulps(tensors["layer00003"].numpy(), exact) <= 1
    for name in tensors:
        tensors[name].materialize()
    return last.round


def test_a_killed_server_goes_on_after_its_last_round(run_job: JobRunner, tmp_path: Path):
    """Killed in the middle, started again: it does the rounds that are left, and ends where it would have ended."""
    checkpoints = tmp_path / "checkpoints"
    run_job(job_in(checkpoints, rounds=30), may_fail=True, during=Killer(5.0))
    done = check(checkpoints)
    assert done is not None
    result = run_job(job_in(checkpoints, rounds=done + 2))
    assert f"Going on after round {done}: 1 rounds are left" in result.server_log
    assert check(checkpoints) == done + 1
    assert not left_in(checkpoints / ".incoming")


@pytest.mark.slow
def test_the_checkpoint_is_whole_whenever_the_server_is_killed(run_job: JobRunner, tmp_path: Path):
    """Twenty times, at random: what is on disk opens, verifies and is gone on from; dead scratch is reclaimed."""
    checkpoints = tmp_path / "checkpoints"
    moments = random.Random(5)
    rounds = -1
    for _ in range(20):
        result = run_job(
            job_in(checkpoints, rounds=1000), may_fail=True, during=Killer(moments.uniform(0.0, 4.0)), timeout=120
        )
        done = check(checkpoints)
        assert done is None or done >= rounds
        rounds = rounds if done is None else done
        scratch = result.workspace.parent / "scratch"
        reclaim(scratch)
        assert not list_scratch(scratch)
    assert rounds > 0


def test_a_full_disk_leaves_results_out_and_the_checkpoint_whole(run_job: JobRunner, tmp_path: Path):
    """With room for one result, the other is left out with the reason; with room for none, the round is skipped."""
    checkpoints = tmp_path / "checkpoints"
    job = job_in(checkpoints, rounds=2, offload={"quota": "8MiB"}, aggregator={"min_results": 1, "on_too_few": "skip"})
    result = run_job(job)
    assert "quota" in result.server_log
    assert "the global model stays as it is" in result.server_log
    tensors = nvflare_lazy.open(checkpoints / MODEL_NAME)
    assert ulps(tensors["layer00003"].numpy(), start(3, job.elements)) == 0
