# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy report` about a deployment: while its job runs, and from its workspace and a download afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.fl_job import FLJob, run
from benchmarks.fl_job.poc import Deployment
from integration_tests.conftest import in_deployment
from nvflare_lazy.errors import RecordsError
from nvflare_lazy.report import JobReport, answers, read_job, summarize
from nvflare_lazy.report.page import page


@in_deployment
@pytest.mark.slow
def test_report_of_a_deployment(tmp_path: Path):
    """A running job has no end; a finished one has all sites, also after the server's run directory is archived."""
    running: list[JobReport] = []

    def look(deployment: Deployment, job_id: str) -> None:
        if not running or not running[-1].rounds:
            try:
                running.append(summarize(read_job(deployment.kits, job_id)))
            except RecordsError:
                return  # the job has not started

    trainer = Path(__file__).parents[1] / "benchmarks" / "fl_job" / "uneven_trainer.py"
    job = FLJob(mode="level-3", clients=3, model_mib=1, tensors=4, rounds=3, external=True, trainer=trainer)
    result = run(job, tmp_path, env="poc", during=look)
    assert result.ok, result.output[-3000:]
    assert running[-1].status is None
    assert answers(running[-1])[0].short == "running or killed"
    assert running[-1].rounds
    assert "running or killed" in page(running[-1])

    assert not list(result.workspace.glob("localhost/*/nvflare_lazy.jsonl"))
    finished = summarize(read_job(result.workspace))
    found = {answer.name: answer.text for answer in answers(finished)}
    print(found)
    assert found["State"].startswith("finished; 3 rounds in ")
    assert found["Slowest client"].startswith("site-2; median ")
    assert found["Skipped"].startswith("1 client, 1 result; site-3 in round 1: ")
    assert finished.processes[0].name == "server"
    roles = [process.role for process in finished.processes]
    assert sorted(roles) == [*["client"] * 3, "server", *["trainer"] * 3]
    assert {client.name: client.sent is not None for client in finished.clients} == {
        f"site-{number}": True for number in (1, 2, 3)
    }

    download = result.server_run_dir.parent
    for place in (download, Path(shutil.make_archive(str(tmp_path / "downloaded"), "zip", download))):
        report = summarize(read_job(place))
        assert (report.job, report.rounds) == (finished.job, finished.rounds)
