# SPDX-License-Identifier: Apache-2.0
"""The main benchmark: the same federated job on stock NVFlare and on nvflare-lazy, side by side.

    python -m benchmarks.federated --size quick            two to three minutes
    python -m benchmarks.federated --size full             about twenty, with the 1 GiB model
    python -m benchmarks.federated --size full --poc       and a local deployment with external trainers

Modes alternate, so that what else the machine does meets all of them alike. Writes `runs.json.gz` (with samples),
a table in Markdown and pictures into `--out`. `--render` makes table and pictures anew from `runs.json.gz`, and
`--resume` goes on with a run that was broken off. A job that fails, as stock NVFlare does where memory ends, is noted.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import charts
from benchmarks.fl_job import MIB, FLJob, run
from benchmarks.fl_job.sampling import Sample
from benchmarks.machine import describe_machine

# One sample of so many is written: four a second. Peaks are of all.
_THINNED = 5
_SIDE_MODES = ("stock", "level-2", "level-3")


@dataclass(frozen=True)
class Plan:
    """What is run: the main case again and again, then more clients and larger models once each."""

    model_mib: int
    clients: tuple[int, ...]
    models_mib: tuple[int, ...]
    modes: tuple[str, ...]
    repeats: int
    tensors: int = 64
    rounds: int = 2
    poc_mib: int = 512
    poc_repeats: int = 2

    def cases(self) -> Iterator[tuple[str, int, int]]:
        """Yield mode, clients and MiB of every run, modes alternating."""
        most = max(self.clients)
        shapes = [(most, self.model_mib)] * self.repeats
        shapes += [(clients, self.model_mib) for clients in self.clients if clients != most]
        shapes += [(2, mib) for mib in self.models_mib if (2, mib) not in shapes]
        for clients, mib in shapes:
            for mode in self.modes if (clients, mib) == shapes[0] else _SIDE_MODES:
                yield mode, clients, mib


PLANS = {
    "quick": Plan(64, (1, 2), (), ("stock", "offload", "level-1", "level-2", "level-3"), 1),
    "full": Plan(1024, (1, 2, 4), (256, 512, 1024), ("stock", "offload", "level-1", "level-2", "level-3"), 3),
}


@dataclass
class Record:
    """One run, as it is written to `runs.json.gz`."""

    env: str
    mode: str
    clients: int
    model_mib: int
    server_peak: int
    client_peak: int
    trainer_peak: int
    scratch_peak: int
    page_cache_growth: int
    disk_written: int
    round_seconds: list[float]
    failed: bool = False
    #: Of each process by role and number: seconds, RssAnon, RssFile, bytes read from and written to the disk so far.
    processes: dict[str, list[tuple[float, int, int, int, int]]] = field(default_factory=dict)
    #: Seconds, bytes of scratch, of the page cache, and of it what is not on the disk yet.
    machine: list[tuple[float, int, int, int]] = field(default_factory=list)

    def server_timeline(self) -> list[tuple[float, int]]:
        """Return seconds and RssAnon of the server's job process, and not of those that only started it."""
        servers = [rows for name, rows in self.processes.items() if name.startswith("server ")]
        return [row[:2] for row in max(servers, key=lambda rows: max(row[1] for row in rows), default=[])]


def measure(mode: str, clients: int, mib: float, plan: Plan, env: str = "sim") -> Record:
    """Run one case and return what it came to."""
    directory = Path(tempfile.mkdtemp(prefix="nvflare-lazy-bench-"))
    try:
        job = FLJob(
            mode=mode,
            clients=clients,
            model_mib=mib,
            tensors=plan.tensors if mib >= 1 else 1,
            rounds=plan.rounds,
            external=env == "poc",
        )
        result = run(job, directory, env=env)
        if not result.ok:
            print(f"{mode} with {clients} clients and {mib} MiB failed:\n{result.output[-2000:]}", file=sys.stderr)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    written: dict[int, int] = {}
    for sample in result.samples:
        written[sample.pid] = max(written.get(sample.pid, 0), sample.disk_written)
    return Record(
        env=env,
        mode=mode,
        clients=clients,
        model_mib=round(mib),
        server_peak=result.server_peak,
        client_peak=result.client_peak,
        trainer_peak=result.peak("trainer"),
        scratch_peak=result.scratch_peak,
        page_cache_growth=result.page_cache_peak,
        disk_written=sum(written.values()),
        round_seconds=result.round_seconds,
        failed=not result.ok,
        processes=_by_process(result.samples),
        machine=[(s.seconds, s.scratch, s.page_cache, s.dirty) for s in result.machine_samples[::_THINNED]],
    )


def _by_process(samples: list[Sample]) -> dict[str, list[tuple[float, int, int, int, int]]]:
    found: dict[str, list[tuple[float, int, int, int, int]]] = defaultdict(list)
    for s in samples:
        found[f"{s.role} {s.pid}"].append((s.seconds, s.anon, s.file, s.disk_read, s.disk_written))
    return {name: rows[::_THINNED] for name, rows in found.items()}


def run_all(plan: Plan, *, poc: bool, done: int) -> Iterator[Record]:
    """Run every case of the plan but the first ones, and before them idle jobs of a few KiB."""
    cases: list[tuple[str, int, float, str]] = [(mode, 2, 1 / 256, "sim") for mode in _SIDE_MODES]
    cases += [(*case, "sim") for case in plan.cases()]
    cases += [(mode, 2, plan.poc_mib, "poc") for mode in (_SIDE_MODES if poc else ()) * plan.poc_repeats]
    for mode, clients, mib, env in cases[done:]:
        yield measure(mode, clients, mib, plan, env)


def show(record: Record) -> None:
    rounds = " ".join(f"{seconds:.1f}" for seconds in record.round_seconds)
    print(
        f"{record.env} {record.mode:10} {record.clients} clients {record.model_mib:5} MiB: "
        f"server {record.server_peak / MIB:6.0f} MiB, rounds {rounds} s",
        flush=True,
    )


def render(records: list[Record], about: dict[str, Any], out: Path) -> None:
    """Write the table and the pictures."""
    groups: dict[tuple[str, int, int, str], list[Record]] = defaultdict(list)
    for record in records:
        if not record.failed:
            groups[record.env, record.model_mib, record.clients, record.mode].append(record)
    failed = [r for r in records if r.failed]
    lines = [
        f"# {about['title']}",
        "",
        f"`{about['command']}`",
        "",
        *(f"- {name}: {text}" for name, text in about["machine"].items()),
        "",
        "Level 1 adds `TensorOffload` to the server, level 2 also the lazy aggregator and persistor, level 3 also",
        "`TensorOffload` to the clients. Memory is the peak anonymous memory (RssAnon) of the server's job process.",
        "The time of a round is the mean over the rounds of a run; a later round excludes the first, in which each",
        "process allocates its memory. Both are the median of all runs, with the range and the ratio to stock NVFlare.",
        "Page cache is the growth of the whole machine's page cache, which the kernel frees on demand. Written is what",
        "all processes together wrote to the disk.",
        "",
        *_noise(list(groups.values())),
        *(["The run was interrupted and resumed.", ""] if about.get("resumed") else []),
        *(
            f"A run of {charts.NAMES[r.mode]} with {r.clients} clients and {r.model_mib} MiB failed, the server at "
            f"{r.server_peak / MIB:.0f} MiB, and does not count.\n"
            for r in failed
        ),
        "| where | model | clients | mode | runs | server peak | a round | a later round | client peak | scratch "
        "| page cache | written |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (env, mib, clients, mode), runs in sorted(groups.items(), key=lambda item: item[0][:3]):
        stock = groups.get((env, mib, clients, "stock"), runs)
        model = f"{mib} MiB" if mib else "4 KiB"
        lines.append(
            f"| {env} | {model} | {clients} | {charts.NAMES[mode]} | {len(runs)} "
            f"| {median(r.server_peak for r in runs) / MIB:.0f} MiB "
            f"| {_beside(runs, stock, 0)} | {_beside(runs, stock, 1)} "
            f"| {median(r.client_peak for r in runs) / MIB:.0f} MiB "
            f"| {max(r.scratch_peak for r in runs) / MIB:.0f} MiB "
            f"| {median(r.page_cache_growth for r in runs) / MIB:.0f} MiB "
            f"| {median(r.disk_written for r in runs) / MIB:.0f} MiB |"
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / "README.md").write_text("\n".join([*lines, "", *_pictures(groups, out), ""]))


def _noise(cases: list[list[Record]]) -> list[str]:
    """Say how far apart repetitions are: by that a single run, and another run of the command, can be judged."""
    repeated = [runs for runs in cases if len(runs) > 1]
    if not repeated:
        return ["Every case ran once, so the noise is unknown.", ""]

    def spread(values: list[float]) -> float:
        return max(abs(value / median(values) - 1) for value in values)

    seconds = max(spread([mean(r.round_seconds) for r in runs]) for runs in repeated)
    memory = max(spread([float(r.server_peak) for r in runs]) for runs in repeated)
    return [
        f"Noise: repeated runs differ from their median by up to {seconds:.0%} in the time of a round and by up to "
        f"{memory:.0%} in the server's peak.",
        "A case that ran once may be as far from its long-run value, and a ratio of two such cases twice as far.",
        "",
    ]


def _beside(runs: list[Record], stock: list[Record], first: int) -> str:
    """Say how long a round takes, from a certain one on, with the range, and how long beside stock NVFlare."""
    mine, theirs = ([mean(r.round_seconds[first:]) for r in some] for some in (runs, stock))
    ratio = "" if runs is stock else f", {median(mine) / median(theirs):.2f} ×"
    extent = f" ({min(mine):.1f} to {max(mine):.1f})" if len(mine) > 1 else ""
    return f"{median(mine):.1f} s{extent}{ratio}"


def _pictures(groups: dict[tuple[str, int, int, str], list[Record]], out: Path) -> list[str]:
    simulated = {key[1:]: runs for key, runs in groups.items() if key[0] == "sim"}
    main_mib = max({mib for mib, _, _ in simulated}, key=lambda mib: sum(m == mib for m, _, _ in simulated))
    most = max(clients for mib, clients, _ in simulated if mib == main_mib)
    by_clients: dict[str, dict[float, list[float]]] = defaultdict(dict)
    by_model: dict[str, dict[float, list[float]]] = defaultdict(dict)
    for (mib, clients, mode), runs in simulated.items():
        if mib == main_mib:
            by_clients[mode][clients] = [r.server_peak for r in runs]
        if clients == 2:
            by_model[mode][mib] = [r.server_peak for r in runs]
    main_case = {mode: runs for (mib, clients, mode), runs in simulated.items() if (mib, clients) == (main_mib, most)}
    where = "FedAvg in the simulator"
    charts.peaks(by_clients, out / "clients.png", f"{where}, {main_mib} MiB model", "clients")
    charts.peaks(by_model, out / "model.png", f"{where}, 2 clients", "model in MiB")
    charts.timeline(
        {mode: (runs[0].server_timeline(), runs[0].server_peak) for mode, runs in main_case.items()},
        out / "timeline.png",
        f"{where}, {main_mib} MiB model, {most} clients",
    )
    charts.round_times(
        {mode: [mean(r.round_seconds) for r in runs] for mode, runs in main_case.items()},
        out / "rounds.png",
        f"{where}, {main_mib} MiB model, {most} clients",
    )
    return [
        "![peak memory by clients](clients.png)",
        "![peak memory by model size](model.png)",
        "![memory over time](timeline.png)",
        "![time of a round](rounds.png)",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.federated", description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=PLANS, default="quick")
    parser.add_argument("--poc", action="store_true", help="also a local deployment with external trainers")
    parser.add_argument("--out", type=Path, default=Path("build/bench/federated"))
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--render", action="store_true", help="only make table and pictures from runs.json.gz again")
    options = parser.parse_args()
    file = options.out / "runs.json.gz"
    if not options.render:
        about = {
            "title": "One federated job, stock NVFlare and nvflare-lazy",
            "command": " ".join(
                ["python -m benchmarks.federated", *(word for word in sys.argv[1:] if word != "--resume")]
            ),
            "machine": describe_machine(),
            "resumed": options.resume,
        }
        options.out.mkdir(parents=True, exist_ok=True)
        records = json.loads(gzip.decompress(file.read_bytes()))["runs"] if options.resume else []
        for record in run_all(PLANS[options.size], poc=options.poc, done=len(records)):
            show(record)
            records.append(vars(record))
            # Each time anew, so that a run that was broken off can be rendered.
            file.write_bytes(gzip.compress(json.dumps({"about": about, "runs": records}).encode(), mtime=0))
    content = json.loads(gzip.decompress(file.read_bytes()))
    render([Record(**record) for record in content["runs"]], content["about"], options.out)
    print(f"table and pictures are in {options.out.resolve()}")


if __name__ == "__main__":
    main()
