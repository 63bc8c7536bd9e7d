# SPDX-License-Identifier: Apache-2.0
"""docs/how-to/restart.md, on a real deployment and in the simulator: the commands, and the outputs that it shows."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import nvflare_lazy
from benchmarks.fl_job import FLJob
from benchmarks.fl_job.poc import Deployment, wait_for_clients
from benchmarks.fl_job.sampling import descendants
from integration_tests.conftest import in_deployment
from integration_tests.expected import next_global, start, ulps
from nvflare_lazy.records import FILE_NAME
from tests.documents.markdown import blocks

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "restart.md"
NVFLARE = str(Path(sys.executable).with_name("nvflare"))
ROUNDS = 24
_ROW = re.compile(r"^([0-9a-f-]{36}) +\S+ +(\S+)", re.MULTILINE)


def job_in(checkpoints: Path, rounds: int) -> FLJob:
    return FLJob(
        mode="level-2",
        model_mib=1,
        tensors=4,
        rounds=rounds,
        controller_path="nvflare_lazy.flare.LazyFedAvg",
        persistor={"checkpoint_dir": str(checkpoints)},
    )


def wait_for(condition: Callable[[], object], what: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def has_ended(pid: int) -> bool:
    """Whether a process has ended; its entry stays if it has lost its parent and nothing waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def rounds_in(file: Path) -> list[int]:
    """Return the rounds that records are about; a process may be writing the last line."""
    text = file.read_text() if file.exists() else ""
    found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [record["round"] for record in found if record["kind"] == "round"]


def check_model(path: Path, job: FLJob) -> None:
    """Check that the model has every round once, whatever happened in between."""
    value = start(1, job.elements)
    for _ in range(job.rounds):
        exact = next_global(value, [1, 2])
        value = exact.astype("float32")
    assert ulps(nvflare_lazy.open(path)["layer00001"].numpy(), exact) <= 1


def documented_statuses(count: int) -> list[str]:
    """Return the status of each job in the page's table of `count` jobs."""
    tables = [[status for _, status in _ROW.findall(block.text)] for block in blocks(PAGE)]
    (table,) = (statuses for statuses in tables if len(statuses) == count)
    return table


@in_deployment
@pytest.mark.slow
def test_a_deployment(tmp_path: Path):
    """The job process is killed, the next job aborted, then the server killed; the last job has all rounds."""
    checkpoints, scratch = tmp_path / "checkpoints", tmp_path / "scratch"
    scratch.mkdir(mode=0o700)
    job = job_in(checkpoints, ROUNDS)
    folder = str(job.write(tmp_path / "job"))
    with ExitStack() as stack:
        deployment = stack.enter_context(Deployment(tmp_path, 2, {"NVFLARE_LAZY_SCRATCH": str(scratch)}))
        environment = {**deployment.env, "NVFLARE_STARTUP_KIT_DIR": str(deployment.kits / "admin@example.com")}
        server = deployment.kits / "localhost"

        def nvflare(*arguments: str) -> str:
            done = subprocess.run(
                [NVFLARE, "job", *arguments], env=environment, capture_output=True, text=True, timeout=300
            )
            print("$ nvflare job", *arguments, f"-> {done.returncode}\n{done.stdout}{done.stderr}")
            return done.stdout + done.stderr

        def submit() -> str:
            output = nvflare("submit", "-j", folder, "--format", "json")
            job_id = json.loads(output[output.index("{") : output.rindex("}") + 1])["data"]["job_id"]
            log = server / job_id / "log.txt"
            wait_for(lambda: log.exists() and re.search("Round|in use by", log.read_text()), "the job did not start")
            print([line[-90:] for line in log.read_text().splitlines() if "Resuming" in line])
            return job_id

        def status_of(job_id: str) -> str:
            with closing(deployment.session()) as session:
                return session.get_job_status(job_id)

        def two_rounds_of(job_id: str) -> int:
            file = server / job_id / FILE_NAME
            wait_for(lambda: len(rounds_in(file)) >= 2, "no rounds")
            return rounds_in(file)[-1]

        def download(job_id: str) -> tuple[dict, Path]:
            output = nvflare("download", job_id, "-o", str(tmp_path / "downloads"), "--format", "json")
            return json.loads(output[output.index("{") : output.rindex("}") + 1]), tmp_path / "downloads" / job_id

        with closing(deployment.session()) as session:
            wait_for_clients(session, 2)
        killed = submit()
        last = two_rounds_of(killed)
        for pid, role in deployment.roles().items():
            if role == "server":
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: status_of(killed).startswith("FINISHED"), "the job did not end")
        assert [status for _, status in _ROW.findall(nvflare("list"))] == documented_statuses(1)
        assert not (server / killed).exists()
        answer, downloaded = download(killed)
        assert "global_model" in answer["data"]["missing_artifacts"]
        assert rounds_in(downloaded / "workspace" / FILE_NAME)[-1] >= last

        aborted = submit()
        wait_for(lambda: last + 3 in rounds_in(server / aborted / FILE_NAME), "no rounds")
        nvflare("abort", aborted, "--force")
        wait_for(lambda: status_of(aborted).startswith("FINISHED"), "the job did not end")

        orphan = submit()
        before = rounds_in(checkpoints / FILE_NAME)[-1]
        wait_for(lambda: rounds_in(server / orphan / FILE_NAME)[-1:] > [before + 1], "no rounds")
        roles = deployment.roles()
        (parent,) = (pid for pid, role in roles.items() if role == "parent-localhost")
        (process,) = (pid for pid, role in roles.items() if role == "server")
        # The process of the job often ends alone after it has lost its clients. Stopped, it keeps the lock.
        os.kill(process, signal.SIGSTOP)
        os.kill(parent, signal.SIGKILL)
        stack.callback(lambda: has_ended(process) or os.kill(process, signal.SIGKILL))
        deployment._processes["localhost"].wait(60)
        deployment.start("localhost")
        with closing(deployment.session()) as session:
            wait_for_clients(session, 2)
        assert rounds_in(server / orphan / FILE_NAME)
        for command in ("download", "abort", "delete"):
            answer = nvflare(command, orphan, *(["--force"] if command != "download" else []))
            assert "has not finished" in answer or "is not running" in answer, answer

        refused = submit()
        wait_for(lambda: status_of(refused).startswith("FINISHED"), "the job was not refused")
        log = (download(refused)[1] / "workspace" / "log.txt").read_text()
        (holder,) = set(re.findall(rf"in use by job '{orphan}', process (\d+) on", log))
        assert int(holder) == process
        os.kill(process, signal.SIGKILL)
        final = submit()
        wait_for(lambda: status_of(final).startswith("FINISHED"), "the job did not end")
        statuses = [status for _, status in _ROW.findall(nvflare("list"))]
        assert statuses[3] == "FINISHED:EXECUTION_EXCEPTION"
        assert [*statuses[:3], *statuses[4:]] == documented_statuses(4)
        answer, downloaded = download(final)
        check_model(Path(answer["data"]["artifacts"]["global_model"]), job)
        # The records continue those of the jobs before, which are next to the checkpoints.
        assert sorted(set(rounds_in(downloaded / "workspace" / FILE_NAME))) == [*range(ROUNDS)]
    assert sorted(set(rounds_in(checkpoints / FILE_NAME))) == [*range(ROUNDS)]
    check_model(checkpoints / "FL_global_model.safetensors", job)


@pytest.mark.slow
def test_the_simulator(tmp_path: Path):
    """Killed and started again with the same workspace, it does the remaining rounds."""
    checkpoints, workspace = tmp_path / "checkpoints", tmp_path / "workspace"
    job = job_in(checkpoints, 6)
    folder = job.write(tmp_path / "job")
    command = [NVFLARE, "simulator", str(folder), "-w", str(workspace), "-n", "2", "-t", "2"]
    file = workspace / "server" / "simulate_job" / FILE_NAME
    environment = {**os.environ, "NVFLARE_LAZY_SCRATCH": str(tmp_path / "scratch")}
    with open(tmp_path / "output.txt", "w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        wait_for(lambda: len(rounds_in(file)) >= 2, "no rounds")
        for pid, _ in reversed(list(descendants(process.pid))):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    before = rounds_in(file)
    assert before[0] == 0
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{6 - 1 - before[-1]} rounds remaining" in done.stdout + done.stderr
    # NVFlare has removed the run directory of the run before, and the job has continued its records.
    for records in (file, checkpoints / FILE_NAME):
        assert sorted(set(rounds_in(records))) == [*range(6)]
    check_model(checkpoints / "FL_global_model.safetensors", job)
