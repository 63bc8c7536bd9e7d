# SPDX-License-Identifier: Apache-2.0
"""A server that is killed, or whose disk is full: the checkpoint is complete, and the next start resumes from it."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

import nvflare_lazy
from benchmarks.fl_job import FLJob
from benchmarks.fl_job.sampling import descendants
from integration_tests.conftest import JobRunner, left_in, records
from integration_tests.expected import next_global, start, ulps
from nvflare_lazy.flare.checkpoint_store import CheckpointStore
from nvflare_lazy.flare.lazy_model_persistor import BEST_NAME, MODEL_NAME
from nvflare_lazy.records import FILE_NAME, read_records
from nvflare_lazy.scratch.directory_lease import LEASE_NAME
from tests.scratch.conftest import small_disk as small_disk
from tests.scratch.conftest import wait_until_empty

ROUNDS = 3


def job_in(checkpoints: Path, rounds: int = ROUNDS, persistor: dict | None = None, **more: object) -> FLJob:
    return FLJob(
        mode="level-2",
        model_mib=16,
        tensors=8,
        rounds=rounds,
        controller_path="nvflare_lazy.flare.LazyFedAvg",
        persistor={"checkpoint_dir": str(checkpoints), **(persistor or {})},
        **more,
    )


class Killer:
    """Kills the server and its child processes some seconds after its first round began, or after a file exists."""

    def __init__(self, seconds: float, file: Path | None = None) -> None:
        self._seconds = seconds
        self._file = file
        self._began: float | None = None

    def __call__(self, workspace: Path) -> None:
        log = workspace / "server" / "log.txt"
        if self._began is None:
            if self._file.exists() if self._file else log.exists() and "return task to client" in log.read_text():
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
    """Check that the checkpoint is complete and has the values of its round; return the round."""
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
    run_job(job_in(checkpoints, rounds=30), may_fail=True, during=Killer(1.0, checkpoints / MODEL_NAME))
    done = check(checkpoints)
    assert done is not None
    assert (checkpoints / LEASE_NAME).exists()
    result = run_job(job_in(checkpoints, rounds=done + 2))
    assert not (checkpoints / LEASE_NAME).exists()
    assert f"Resuming after round {done}; 1 rounds remaining." in result.server_log
    assert check(checkpoints) == done + 1
    assert not left_in(checkpoints / ".incoming")
    # The records of both runs, without a gap, in the run directory and with the checkpoints.
    for path in (result.server_run_dir / FILE_NAME, checkpoints / FILE_NAME):
        found = read_records(path)
        assert len(found.starts) == 2
        assert [record.round for record in found.rounds] == list(range(done + 2))
        assert all(record.model is not None and record.aggregated == ["site-1", "site-2"] for record in found.rounds)
        assert found.end is not None


@pytest.mark.slow
@pytest.mark.parametrize("max_shard_size", [None, "5MiB"])
def test_the_checkpoint_is_whole_whenever_the_server_is_killed(run_job: JobRunner, tmp_path: Path, max_shard_size):
    """Ten times, at random: the files on disk verify and the next start resumes from them; no scratch is left."""
    checkpoints, scratch = tmp_path / "checkpoints", tmp_path / "scratch"
    offload = {"scratch_dir": str(scratch)}
    persistor = {"max_shard_size": max_shard_size}
    moments = random.Random(5)
    done = -1
    for _ in range(10):
        run_job(
            job_in(checkpoints, rounds=1000, offload=offload, persistor=persistor),
            may_fail=True,
            during=Killer(moments.uniform(0.0, 4.0)),
            timeout=120,
        )
        now = check(checkpoints)
        assert now is None or now >= done
        done = done if now is None else now
        if scratch.exists():  # it was not killed before it had any
            wait_until_empty(scratch)
    assert done > 0
    print(f"killed 10 times: {done + 1} rounds complete, nothing left in scratch")
    result = run_job(job_in(checkpoints, rounds=done + 2, offload=offload, persistor=persistor))
    assert f"Resuming after round {done}; 1 rounds remaining." in result.server_log
    assert check(checkpoints) == done + 1
    wait_until_empty(scratch)


@pytest.mark.slow
def test_a_job_begins_with_what_another_one_saves(run_job: JobRunner, tmp_path: Path):
    """The last checkpoint of a running job is the initial model of another; the first one continues undisturbed."""
    checkpoints = tmp_path / "checkpoints"
    taken = []

    def begin_another(_: Path) -> None:
        if not taken and (checkpoints / MODEL_NAME).exists():
            persistor = {"source_ckpt_file_full_name": str(checkpoints / MODEL_NAME), "model": None}
            taken.append(run_job(job_in(tmp_path / "other", rounds=1, persistor=persistor)))

    run_job(job_in(checkpoints, rounds=3), during=begin_another)
    (other,) = taken
    assert f"Starting from the checkpoint {checkpoints / MODEL_NAME}" in other.server_log
    assert check(checkpoints) == 2
    # It has added a round to one of the rounds of the first job.
    found = nvflare_lazy.open(tmp_path / "other" / MODEL_NAME)["layer00003"].numpy()
    value = start(3, job_in(checkpoints).elements)
    possible = []
    for _ in range(3):
        value = next_global(value, [1, 2]).astype("float32")
        possible.append(ulps(found, next_global(value, [1, 2])))
    assert min(possible) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("on_too_few", ["fail", "skip"])
def test_a_disk_without_room_for_any_result(run_job: JobRunner, tmp_path: Path, on_too_few: str):
    """The job fails or skips the round, as configured; the log has the reason; the last checkpoint is unchanged."""
    checkpoints = tmp_path / "checkpoints"
    run_job(job_in(checkpoints, rounds=1))
    before = (checkpoints / MODEL_NAME).read_bytes()
    aggregator = {"on_too_few": on_too_few}
    job = job_in(checkpoints, rounds=2, offload={"scratch_quota": "8MiB"}, aggregator=aggregator)
    result = run_job(job, may_fail=on_too_few == "fail")
    for site in (1, 2):
        assert re.search(f"result of site-{site} .*not used: .*quota of 8.0 MiB", result.server_log)
    assert "round 1 has no usable results" in result.server_log
    finished = "Finished FedAvg" in result.server_log
    assert finished == ("the global model is unchanged" in result.server_log) == (on_too_few == "skip")
    assert (checkpoints / MODEL_NAME).read_bytes() == before
    if on_too_few == "fail":
        assert check(checkpoints) == 0


@pytest.mark.slow
def test_a_disk_that_the_kernel_calls_full(run_job, tmp_path, small_disk):
    """No quota, only a small file system: results that exceed it are skipped, and the job ends well.

    One comes after the other: of two that fill the disk at the same moment, neither may get through.
    """
    job = FLJob(
        mode="level-2",
        model_mib=6,
        tensors=6,
        rounds=1,
        offload={"scratch_dir": str(small_disk), "min_free": 0},
        trainer=Path(__file__).parent / "late_trainer.py",
    )
    log = tmp_path / "job1" / "workspace" / "server" / "simulate_job" / FILE_NAME
    result = run_job(job, environment={"ROUND_LOG": str(log)})
    (record,) = records(result, "round")
    assert len(record["aggregated"]) == 1
    (reason,) = record["skipped"].values()
    print("skipped:", reason)
    assert "free some space" in reason
    assert not left_in(small_disk)
