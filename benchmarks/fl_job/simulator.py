# SPDX-License-Identifier: Apache-2.0
"""Runs the measured job in NVFlare's simulator, all clients at a time, and watches its processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.fl_job.job import FLJob
from benchmarks.fl_job.memory_group import MemoryGroup
from benchmarks.fl_job.result import RunResult, read_records
from benchmarks.fl_job.sampling import Sampler, descendants

#: In the command line of the process that instantiates a model class.
INSTANTIATION = "nvflare_lazy.flare.write_initial_model"
_CLIENT = re.compile(r"simulator_worker .*--client (\S+)")


def run_in_simulator(
    job: FLJob,
    directory: Path,
    *,
    timeout: float = 900,
    interval: float = 0.05,
    environment: dict[str, str] | None = None,
    during: Callable[[Path], None] | None = None,
    group: MemoryGroup | None = None,
) -> RunResult:
    """Run a job in the simulator.

    Args:
        job: What to run.
        directory: An empty directory for the job, the workspace and the scratch.
        timeout: Seconds after which the run is ended.
        interval: Seconds between two samples.
        environment: Further environment variables.
        during: Called over and over with the workspace while the job runs, to interfere with it.
        group: Limits the memory of all processes together.
    """
    folder = job.write(directory / "job")
    workspace, scratch = directory / "workspace", directory / "scratch"
    scratch.mkdir(mode=0o700)
    variables = {**os.environ, "NVFLARE_LAZY_SCRATCH": str(scratch), **(environment or {})}
    command = [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator", str(folder), "-w", str(workspace)]
    command += ["-n", str(job.clients), "-t", str(job.clients)]
    started = time.time()
    with open(directory / "output.txt", "w+") as output:
        process = subprocess.Popen(
            command,
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            start_new_session=True,
            preexec_fn=group.enter if group else None,  # no thread runs yet
        )
        try:
            with Sampler(lambda: simulator_roles(process.pid), interval, scratch) as sampler:
                status = _wait(process, timeout, during, workspace)
        finally:
            end_tree(process)
        seconds = time.time() - started
        output.seek(0)
        text = output.read()
    log = workspace / "server" / "log.txt"
    return RunResult(
        job=job,
        started=sampler.started,
        seconds=seconds,
        status=status,
        samples=sampler.samples,
        machine_samples=sampler.machine_samples,
        server_log=log.read_text() if log.exists() else "",
        records=read_records(log.with_suffix(".json")),
        server_run_dir=workspace / "server" / "simulate_job",
        workspace=workspace,
        output=text,
    )


def simulator_roles(root: int) -> dict[int, str]:
    """Say which process of a simulator run plays which role."""
    roles = {}
    for pid, command in descendants(root):
        if match := _CLIENT.search(command):
            roles[pid] = f"client-{match[1]}"
        elif INSTANTIATION in command:
            roles[pid] = "instantiation"
        elif "trainer.py" in command:
            roles[pid] = "trainer"
        elif "simulator.simulator" in command:
            roles[pid] = "server"
        else:
            roles[pid] = "helper"
    return roles


def end_tree(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """End a process and everything below it that is still there."""
    left = [pid for pid, _ in descendants(process.pid)]
    for pid in reversed(left):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    process.wait()


def _wait(
    process: subprocess.Popen[bytes] | subprocess.Popen[str],
    timeout: float,
    during: Callable[[Path], None] | None,
    workspace: Path,
) -> int:
    deadline = time.time() + timeout
    while process.poll() is None:
        if time.time() > deadline:
            return -1
        if during is not None:
            during(workspace)
        time.sleep(0.02)
    return process.returncode
