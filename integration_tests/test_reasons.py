# SPDX-License-Identifier: Apache-2.0
"""What the server's operator reads about clients that fail: the reasons, and the error for too few results."""

from __future__ import annotations

import json
import re
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from benchmarks.fl_job import FLJob
from benchmarks.fl_job.poc import Deployment, collect, wait_for_clients
from integration_tests.conftest import JobRunner, in_deployment, records
from nvflare_lazy.records import FILE_NAME

FAILING = Path(__file__).parent / "failing_trainer.py"
FAULTS = {"2": "raises", "3": "nan", "4": "large", "5": "killed", "6": "silent"}


@pytest.mark.slow
def test_the_error_for_too_few_results_lists_every_client(run_job: JobRunner, tmp_path: Path):
    """One client raises, one is killed, one sends NaN, one too much, one never answers: each with its own reason."""
    release = tmp_path / "release"
    job = FLJob(
        mode="level-3",
        clients=6,
        model_mib=1,
        tensors=4,
        rounds=1,
        trainer=FAILING,
        controller={"min_responses": 4, "wait_time_after_min_received": 1},
        controller_path="nvflare_lazy.flare.LazyFedAvg",
        offload={"max_result_size": "4MiB"},
        aggregator={"min_results": 2},
    )

    def release_the_silent_one(workspace: Path) -> None:
        log = workspace / "server" / "log.txt"
        if log.exists() and "Round 0 failed" in log.read_text():
            release.touch()

    result = run_job(
        job,
        environment={"FAULTS": json.dumps(FAULTS), "RELEASE": str(release)},
        during=release_the_silent_one,
        may_fail=True,
    )
    (record,) = records(result, "round")
    assert record["aggregated"] == []
    reasons = record["skipped"]
    # The escape is text: a client cannot color the terminal of the server's operator.
    raised = r"'ValueError: no batch of 32 \x1b[31m images'"
    assert re.fullmatch(rf"its task ended with '\w+': {re.escape(raised)}", reasons["site-2"])
    assert "nan" in reasons["site-3"]
    assert "more than the limit of 4.0 MiB" in reasons["site-4"]
    for site in ("site-5", "site-6"):
        assert reasons[site] == f"no result received; see {site}/log.txt"
        assert (result.workspace / site / "log.txt").exists()
    assert reasons["site-1"] == "not aggregated"
    (error,) = set(re.findall(r"TooFewResultsError: (round 0 has 1 usable results.*)", result.server_log))
    print(error)
    for site in FAULTS:
        assert f"site-{site} ({reasons[f'site-{site}']})" in error
    assert error.endswith("; site-1 (accepted)")
    assert f"Round 0: the result of site-2 is not used: {reasons['site-2']}\n" in result.server_log


class JobThatLosesClients(FLJob):
    """NVFlare ends a job with fewer clients than its `min_clients`."""

    def write(self, folder: Path) -> Path:
        meta = super().write(folder) / "meta.json"
        meta.write_text(json.dumps({**json.loads(meta.read_text()), "min_clients": 2}))
        return folder


@in_deployment
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["level-2", "level-3"])
def test_reasons_in_a_deployment(tmp_path: Path, mode: str):
    """With the package, even of a trainer that hangs after its error; without it, from NVFlare's streamed log.

    NVFlare streams the errors of a client job. The output of an external trainer is not among them.
    """
    is_level_3, (temporary, scratch, release) = mode == "level-3", (tmp_path / name for name in ("tmp", "s", "release"))
    for directory in (temporary, scratch):
        directory.mkdir(mode=0o700)
    faults = {"2": "raises", "3": "killed" if is_level_3 else "nan", "4": "silent"}
    job = JobThatLosesClients(
        mode=mode,
        clients=4,
        model_mib=1,
        tensors=4,
        rounds=2,
        external=is_level_3,
        trainer=FAILING,
        controller_path="nvflare_lazy.flare.LazyFedAvg",
        # An error arrives after the result of another client, and within half a second.
        controller={"min_responses": 1 if is_level_3 else 2, "wait_time_after_min_received": 10},
    )
    environment = {
        "NVFLARE_LAZY_SCRATCH": str(scratch),
        "TMPDIR": str(temporary),
        "FAULTS": json.dumps(faults),
        "RELEASE": str(release),
    }
    with ExitStack() as stack:
        deployment = stack.enter_context(Deployment(tmp_path, 4, environment))
        session = stack.enter_context(closing(deployment.session()))
        wait_for_clients(session, 4)
        job_id = session.submit_job(str(job.write(tmp_path / "job")))

        log = deployment.kits / "localhost" / job_id / "log.txt"
        deadline = time.monotonic() + 300
        while not (log.exists() and "Round 1 finished" in log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.2)
        release.touch()
        session.monitor_job(job_id, timeout=300)
        status = session.get_job_status(job_id)
        run = collect(session, deployment, job_id, tmp_path)
    assert status == "FINISHED:COMPLETED", (run / "log.txt").read_text()[-5000:]
    found = [json.loads(line) for line in (run / FILE_NAME).read_text().splitlines()]
    first, second = (record for record in found if record["kind"] == "round")
    print(json.dumps([first["skipped"], second["skipped"]], indent=1))
    raised = r"'ValueError: no batch of 32 \x1b[31m images'"
    assert first["aggregated"] == ["site-1"]
    assert first["skipped"]["site-4"] == f"no result received; see {job_id}/log.txt in its workspace"
    if is_level_3:
        assert first["skipped"]["site-2"] == f"no result received: {raised}"
        assert "'EXECUTION_EXCEPTION': \"trainer process" in first["skipped"]["site-3"]
        assert second["skipped"]["site-2"] == f"no result received since round 0: {raised}"
    else:
        assert re.fullmatch(rf"its task ended with '\w+': {re.escape(raised)}", first["skipped"]["site-2"])
        assert "nan" in first["skipped"]["site-3"]
        assert second["skipped"]["site-2"] == f"its task ended with 'EXECUTION_EXCEPTION': {raised}"
