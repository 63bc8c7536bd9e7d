# SPDX-License-Identifier: Apache-2.0
"""Makes the report pages in docs/results/reports: runs their jobs, keeps the records, and draws the pages from them.

python -m benchmarks.reports                    all jobs, one after the other
python -m benchmarks.reports swarm resumed      some of them
python -m benchmarks.reports --draw             no job; the pages of the records that are kept
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.fl_job import FLJob, RunResult, run
from benchmarks.fl_job.sampling import descendants
from benchmarks.fl_job.swarm_job import SwarmJob
from nvflare_lazy.records import FILE_NAME, read_records
from nvflare_lazy.report import answers, read_job, summarize
from nvflare_lazy.report.page import page

PLACE = Path(__file__).parents[1] / "docs" / "results" / "reports"


def demo(directory: Path) -> RunResult:
    """The job of `make demo` at level 3, in the simulator."""
    return run(FLJob(mode="level-3", clients=4, model_mib=256, tensors=32, rounds=3), directory)


def skipped(directory: Path) -> RunResult:
    """A deployment with external trainers: one client is slow, and another one sends a value that is not finite."""
    trainer = Path(__file__).parent / "fl_job" / "uneven_trainer.py"
    job = FLJob(mode="level-3", clients=3, model_mib=64, tensors=16, rounds=4, external=True, trainer=trainer)
    return run(job, directory, env="poc")


def resumed(directory: Path) -> RunResult:
    """A job that is killed in its third round, and resumed by a second job with the same checkpoints."""
    job = FLJob(
        mode="level-3",
        clients=2,
        model_mib=128,
        tensors=16,
        rounds=5,
        controller_path="nvflare_lazy.flare.LazyFedAvg",
        persistor={"checkpoint_dir": str(directory / "checkpoints")},
    )
    (directory / "first").mkdir()
    run(job, directory / "first", during=_kill_in_round_2)
    (directory / "second").mkdir()
    return run(job, directory / "second")


def _kill_in_round_2(workspace: Path) -> None:
    path = workspace / "server" / "simulate_job" / FILE_NAME
    if not path.exists():
        return
    records = read_records(path)
    if len(records.rounds) < 2 or not records.contributions:
        return
    for pid, command in descendants(os.getpid()):
        if str(workspace) in command:
            os.kill(pid, signal.SIGKILL)


def swarm(directory: Path) -> RunResult:
    """Swarm learning: in each round, one of the clients aggregates."""
    return run(SwarmJob(mode="level-2", clients=3, model_mib=128, tensors=16, rounds=4), directory)


JOBS: dict[str, Callable[[Path], RunResult]] = {each.__name__: each for each in (demo, skipped, resumed, swarm)}


def keep_records(result: RunResult, target: Path) -> None:
    """Write the records of all sites to a zip file."""
    server = result.server_run_dir / FILE_NAME
    files = {path.parents[1].name: path for path in result.workspace.rglob(FILE_NAME) if path != server}
    if server.exists():  # in a deployment, in a download; in swarm learning, the server does not download
        files["server"] = server
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for site, path in sorted(files.items()):
            archive.write(path, f"{site}/{FILE_NAME}")


def draw(name: str, place: Path) -> None:
    """Write the page of kept records, as of their last record."""
    os.chdir(place)
    files = read_job(Path(f"{name}.zip"))
    report = summarize(files, made=summarize(files).last)
    path = place / f"{name}.html"
    path.write_text(page(report), encoding="utf-8")
    print(f"{path}: {path.stat().st_size} bytes")
    for answer in answers(report):
        print(f"  {answer.name + ':':21}{answer.text}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reports", description=__doc__.splitlines()[0])
    parser.add_argument("jobs", nargs="*", help=f"which ones: {', '.join(JOBS)}. Default: all")
    parser.add_argument("--draw", action="store_true", help="only draw the pages of the records that are kept")
    parser.add_argument("--out", type=Path, default=PLACE)
    options = parser.parse_args()
    if unknown := set(options.jobs) - JOBS.keys():
        parser.error(f"unknown jobs: {', '.join(unknown)}; available: {', '.join(JOBS)}")
    place = options.out.resolve()
    for name in options.jobs or JOBS:
        if not options.draw:
            directory = Path(tempfile.mkdtemp(prefix=f"report-{name}-"))
            try:
                result = JOBS[name](directory)
                if not result.ok:
                    print(result.output[-3000:])
                    return 1
                keep_records(result, place / f"{name}.zip")
            finally:
                shutil.rmtree(directory, ignore_errors=True)
        draw(name, place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
