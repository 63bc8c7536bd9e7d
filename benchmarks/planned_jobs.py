# SPDX-License-Identifier: Apache-2.0
"""Five jobs whose disk, memory and traffic `nvflare-lazy plan` predicts: runs them and measures what they took.

    python -m benchmarks.planned_jobs                              all five, about four minutes
    python -m benchmarks.planned_jobs --out tests/planned_jobs.json    replaces the committed measurements

Disk is the allocated space of all files, each counted once however many names it has. Memory is the peak of RssAnon of
one process of each role. Traffic is the bytes on loopback per round, in a separate network namespace, which needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fl_job import MIB, FLJob, RunResult, run
from benchmarks.fl_job.network import separate_loopback
from benchmarks.fl_job.sampling import descendants
from benchmarks.machine import describe_machine
from nvflare_lazy._system import available_cores
from nvflare_lazy.job_plan import Environment, JobOptions, JobPlan, ModelSize

# The best model is no longer kept when the last round is written: the checkpoints are at their largest.
_MORE_ROUNDS_THAN_KEPT = 3
_TENSORS = 32
# Seconds between two samples of the disk.
_INTERVAL = 0.03
# All models have the same accuracy, so the first one is the best.
_SELECTOR = {
    "id": "selector",
    "path": "nvflare.app_common.widgets.intime_model_selector.IntimeModelSelector",
    "args": {"key_metric": "accuracy"},
}


@dataclass(frozen=True)
class PlannedJob:
    """One job.

    Args:
        env: "sim", "poc", or "prod", which is "poc" with a scratch root for the server alone.
        level: The level.
        clients: Number of clients.
        mib: Size of the model.
        external: Whether trainers are separate processes.
        rule: The aggregation rule.
        optimizer: The server optimizer.
        difference: Whether clients send differences.
        keep_rounds: Rounds whose models are kept.
    """

    env: Environment
    level: int
    clients: int
    mib: int
    external: bool = False
    rule: str = "mean"
    optimizer: str | None = None
    difference: bool = False
    keep_rounds: int = 1

    def fl_job(self, checkpoints: Path) -> FLJob:
        """Return the job that is run."""
        aggregator: dict[str, Any] = {"rule": self.rule}
        if self.optimizer is not None:
            aggregator["server_optimizer"] = {"name": self.optimizer, "lr": 0.1}
        return FLJob(
            mode=f"level-{self.level}",
            clients=self.clients,
            model_mib=self.mib,
            tensors=_TENSORS,
            rounds=self.keep_rounds + _MORE_ROUNDS_THAN_KEPT,
            difference=self.difference,
            external=self.external,
            aggregator=aggregator,
            persistor={"checkpoint_dir": str(checkpoints), "keep_rounds": self.keep_rounds},
            components=(_SELECTOR,),
        )


JOBS = (
    PlannedJob("sim", level=3, clients=4, mib=128),
    PlannedJob("sim", level=2, clients=2, mib=256, rule="median", optimizer="fedadam", keep_rounds=2),
    PlannedJob("poc", level=3, clients=3, mib=192, external=True, rule="median", difference=True),
    PlannedJob("prod", level=3, clients=2, mib=256, external=True, optimizer="fedavgm", keep_rounds=3),
    PlannedJob("prod", level=2, clients=3, mib=128, external=True, difference=True),
)


class DiskWatch:
    """Samples the disk that directories take until it is left.

    Args:
        places: Directories by name.
    """

    def __init__(self, places: dict[str, tuple[Path, ...]]) -> None:
        self.peaks = dict.fromkeys(places, 0)
        self._places = places
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)

    def __enter__(self) -> DiskWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(_INTERVAL):
            open_files = _open_files()
            for name, directories in self._places.items():
                found: dict[int, int] = {}
                for directory in directories:
                    found |= _files(directory)
                    found |= {inode: size for path, inode, size in open_files if path.startswith(f"{directory}/")}
                self.peaks[name] = max(self.peaks[name], sum(found.values()))


def _files(directory: Path) -> dict[int, int]:
    """Return the allocated bytes of each file below a directory, by inode."""
    found = {}
    for path, _, names in os.walk(directory):
        for name in names:
            try:
                status = os.lstat(os.path.join(path, name))
            except OSError:
                continue
            found[status.st_ino] = status.st_blocks * 512
    return found


def _open_files() -> list[tuple[str, int, int]]:
    """Return path, inode and allocated bytes of the files without a name that processes below this one have open.

    A checkpoint has no name until it is complete.
    """
    found = []
    for pid, _ in descendants(os.getpid()):
        directory = f"/proc/{pid}/fd"
        try:
            names = os.listdir(directory)
        except OSError:
            continue
        for name in names:
            try:
                path = os.readlink(f"{directory}/{name}")
                status = os.stat(f"{directory}/{name}") if path.endswith(" (deleted)") else None
            except OSError:
                continue
            if status is not None and stat.S_ISREG(status.st_mode):
                found.append((path, status.st_ino, status.st_blocks * 512))
    return found


def measure(planned: PlannedJob, directory: Path) -> dict[str, Any]:
    """Run a job and return its numbers in MiB.

    Raises:
        RuntimeError: The job failed.
    """
    checkpoints, scratch, server = directory / "checkpoints", directory / "scratch", directory / "server-scratch"
    job = planned.fl_job(checkpoints)
    arguments = {"server_scratch": server} if planned.env == "prod" else {}
    env = "sim" if planned.env == "sim" else "poc"
    places = {"checkpoints": (checkpoints,), "server scratch": (server,), "disk": (checkpoints, server, scratch)}
    with DiskWatch(places) as watch:
        result: RunResult = run(job, directory, env=env, **arguments)
    if not result.ok:
        raise RuntimeError(f"{planned} failed:\n{result.output[-3000:]}\n{result.server_log[-3000:]}")
    if planned.env != "prod":
        # One root for all sites.
        del watch.peaks["server scratch"]
    return {
        "job": vars(planned),
        **{name: round(nbytes / MIB) for name, nbytes in watch.peaks.items()},
        **{f"memory of {role}": round(nbytes / MIB) for role, nbytes in result.peaks.items() if role != "helper"},
        "traffic": round(result.sockets_per_round / MIB),
    }


_ROLES = {"server job": "server", "client job": "client"}


def plan(planned: PlannedJob, cores: int) -> dict[str, int]:
    """Return the plan of a job in MiB, with the names of `measure`; processes without this package are missing."""
    nbytes = planned.mib * MIB
    model = ModelSize(nbytes, nbytes, nbytes // _TENSORS, _TENSORS, nbytes)
    options = JobOptions(
        clients=planned.clients,
        level=planned.level,
        rule=planned.rule,
        optimizer=planned.optimizer,
        sends_differences=planned.difference,
        keep_rounds=planned.keep_rounds,
        external=planned.external,
        install_in_trainers=planned.external and planned.level == 3,
        environment=planned.env,
        cores=cores,
    )
    found = JobPlan.of(model, options)
    numbers = {"checkpoints": found.checkpoints(), "disk": found.checkpoints() + found.scratch()}
    if planned.env == "prod":
        numbers["server scratch"] = found.scratch("server")
    for process in found.processes:
        if process.memory is not None:
            name = f"memory of {_ROLES.get(process.process, process.process)}"
            numbers[name] = max(numbers.get(name, 0), process.memory)
    # What one site sends, another one receives.
    numbers["traffic"] = sum(process.count * (process.received + process.loopback) for process in found.processes)
    return {name: round(nbytes / MIB) for name, nbytes in numbers.items()}


def compare(content: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Return each planned number of the measured jobs: its job and name, the plan and the measurement in MiB."""
    found = []
    for measured in content["jobs"]:
        job = PlannedJob(**measured["job"])
        for name, planned in plan(job, content["cores"]).items():
            found.append((f"{job}: {name}", planned, measured[name]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planned_jobs", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file for the machine and the measurements")
    parser.add_argument("--jobs", nargs="+", type=int, default=range(len(JOBS)), help="numbers of the jobs, from 0")
    options = parser.parse_args()
    if not separate_loopback():
        sys.exit("cannot create a network namespace: run as root")
    measured = []
    for number in options.jobs:
        directory = Path(tempfile.mkdtemp(prefix="nl-plan-"))
        try:
            measured.append(measure(JOBS[number], directory))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        print(json.dumps(measured[-1]), flush=True)
    if options.out is not None:
        content = {"machine": describe_machine(), "cores": available_cores(), "jobs": measured}
        options.out.write_text(json.dumps(content, indent=2) + "\n")
        for name, planned, found in compare(content):
            print(f"{name}: planned {planned}, measured {found}")


if __name__ == "__main__":
    main()
