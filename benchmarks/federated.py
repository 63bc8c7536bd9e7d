# SPDX-License-Identifier: Apache-2.0
"""The main benchmark: the same federated job on stock NVFlare and on nvflare-lazy, side by side.

    python -m benchmarks.federated                             quick: two to three minutes
    python -m benchmarks.federated --size full                 all tables, about 25 minutes
    python -m benchmarks.federated --size full --minutes 9     the same in parts: repeat it with --resume

Three tables: a local deployment with external trainers, the simulator, and the server's memory for more clients and
larger models. Modes alternate, so that other load of the machine affects all of them. Writes `runs.json.gz`, a
report in Markdown and pictures into `--out`. `--render` repeats report and pictures from `runs.json.gz`. The report
lists failed jobs, such as a job of stock NVFlare that runs out of memory.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.federated_report import APART, Case, Record, render, required
from benchmarks.fl_job import MIB, FLJob, run
from benchmarks.fl_job.network import separate_loopback
from benchmarks.machine import describe_machine

# One tensor of 4 KiB: this job measures NVFlare and Python alone.
_IDLE_MIB = 1 / 256


@dataclass(frozen=True)
class Plan:
    """The cases of a measurement.

    Args:
        tables: Environment, clients, MiB of the model and modes of each of the first two tables.
        repeats: Runs of each mode in these tables.
        rounds: Rounds of these jobs.
        shapes: Clients and MiB of the third table, each of which runs once.
        stock_mib: Maximum of clients × MiB with which the third table also has stock NVFlare.
    """

    tables: tuple[tuple[str, int, int, tuple[str, ...]], ...]
    repeats: int
    rounds: int
    shapes: tuple[tuple[int, int], ...] = ()
    stock_mib: int = 0

    def cases(self) -> Iterator[Case]:
        """Yield every run; in each other repetition, modes are in reverse order."""
        for env, clients, mib, modes in self.tables:
            for repeat in range(self.repeats):
                for mode in modes[:: -1 if repeat % 2 else 1]:
                    yield Case("rounds", env, mode, clients, mib, self.rounds)
        for env in ("poc", "sim") if self.shapes else ():
            yield Case("memory", env, "level-3", 2, _IDLE_MIB, 2)
        for clients, mib in self.shapes:
            if clients * mib <= self.stock_mib:
                yield Case("memory", "sim", "stock", clients, mib, 2)
            yield Case("memory", "sim", "level-3", clients, mib, 2)


_LEVELS = ("level-1", "level-2", "level-3")
PLANS = {
    "quick": Plan((("poc", 2, 64, ("stock", *_LEVELS, APART)), ("sim", 2, 64, ("stock", "level-3"))), 1, 2),
    "full": Plan(
        (("poc", 2, 512, ("stock", "offload", *_LEVELS, APART)), ("sim", 4, 512, ("stock", *_LEVELS))),
        3,
        3,
        tuple((clients, 256) for clients in (1, 2, 4, 8, 16)) + tuple((2, mib) for mib in (512, 1024, 2048, 4096)),
        2048,
    ),
}


def measure(case: Case) -> Record:
    """Run one case and return its numbers."""
    directory = Path(tempfile.mkdtemp(prefix="nvflare-lazy-bench-"))
    arguments = {"server_scratch": directory / "server-scratch"} if case.mode == APART else {}
    try:
        job = FLJob(
            mode="level-3" if case.mode == APART else case.mode,
            clients=case.clients,
            model_mib=case.mib,
            tensors=64 if case.mib >= 1 else 1,
            rounds=case.rounds,
            external=case.env == "poc",
        )
        result = run(job, directory, env=case.env, **arguments)
        if not result.ok:
            print(f"{case} failed:\n{result.output[-2000:]}", file=sys.stderr)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return Record(
        case,
        failed=not result.ok,
        round_seconds=result.round_seconds,
        cpu=result.cpu_by_role,
        peaks=result.peaks,
        written=result.written_per_round if result.ok else 0,
        sockets=result.sockets_per_round if result.ok else 0,
        scratch_peak=result.scratch_peak,
        page_cache_growth=result.page_cache_peak,
        timeline=[(round(seconds, 2), anon) for seconds, anon in result.server_timeline[::5]],
    )


def show(record: Record) -> None:
    """Print a line about a run."""
    case, rounds = record.case, " ".join(f"{seconds:.1f}" for seconds in record.round_seconds)
    print(
        f"{case.env} {case.mode:13} {case.clients:2} clients {case.mib:6.0f} MiB: rounds {rounds} s, "
        f"CPU {record.cpu_seconds:.1f} s, server {record.peaks.get('server', 0) / MIB:.0f} MiB",
        flush=True,
    )


def load(file: Path) -> tuple[dict[str, Any], list[Record]]:
    """Return what `save` wrote."""
    content = json.loads(gzip.decompress(file.read_bytes()))
    return content["about"], [Record(**{**run, "case": Case(**run["case"])}) for run in content["runs"]]


def save(file: Path, about: dict[str, Any], records: list[Record]) -> None:
    """Write all runs, so that a measurement that is broken off can be rendered and resumed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"about": about, "runs": [{**vars(record), "case": record.case._asdict()} for record in records]}
    file.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))


def run_all(plan: Plan, about: dict[str, Any], records: list[Record], file: Path, minutes: float) -> int:
    """Run the cases that have no record, and return the number of cases that remain when the time is over."""
    done = Counter(record.case for record in records)
    left = []
    for case in plan.cases():
        done[case] -= 1
        if done[case] < 0:
            left.append(case)
    end = time.monotonic() + 60 * minutes
    longest = 0.0
    while left and time.monotonic() + longest < end:
        started = time.monotonic()
        records.append(measure(left.pop(0)))
        longest = max(longest, time.monotonic() - started)
        show(records[-1])
        save(file, about, records)
    return len(left)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.federated", description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=PLANS, default="quick")
    parser.add_argument("--out", type=Path, default=Path("build/bench/federated"))
    parser.add_argument(
        "--minutes", type=float, default=1e6, help="stop before a run that would end later; see --resume"
    )
    parser.add_argument("--resume", action="store_true", help="continue the measurement in --out")
    parser.add_argument("--render", action="store_true", help="only write report and pictures of runs.json.gz")
    options = parser.parse_args()
    file = options.out / "runs.json.gz"
    if options.render or options.resume:
        about, records = load(file)
    else:
        about = {"command": f"python -m benchmarks.federated --size {options.size}", "machine": describe_machine()}
        records = []
    if not options.render:
        about["separate"] = separate_loopback() and about.get("separate", True)
        if left := run_all(PLANS[options.size], about, records, file, options.minutes):
            print(f"{left} runs are left: repeat the command with --resume")
    render(records, about, options.out)
    print("\n".join(required(records)))
    print(f"report and pictures are in {options.out.resolve()}")


if __name__ == "__main__":
    main()
