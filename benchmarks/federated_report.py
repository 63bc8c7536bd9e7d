# SPDX-License-Identifier: Apache-2.0
"""The report of `benchmarks.federated`: tables, pictures, and the limits that the package must keep.

A number of a case is the median over its runs, each of which counts once, whatever its number of rounds. Tables,
pictures and limits all take it from `over_runs`, so that they agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from textwrap import wrap
from typing import Any, NamedTuple

from benchmarks import charts
from benchmarks.fl_job import MIB

#: Level 3 with a server that cannot exchange files with the sites.
APART = "level-3-apart"

_ENVIRONMENTS = {
    "poc": "A deployment on one machine, external trainers",
    "sim": "The simulator, trainers in the clients' processes",
}
#: Each column of CPU seconds, and the roles of the processes in it.
_ROLES = {
    "server": ("server", "instantiation"),
    "client jobs": ("client",),
    "trainers": ("trainer",),
    "parents": ("parent", "helper"),
}
_PEAKS = {"server": "server", "client job": "client", "trainer": "trainer"}


class Case(NamedTuple):
    """What one run measures; `table` is "rounds" or "memory"."""

    table: str
    env: str
    mode: str
    clients: int
    mib: float
    rounds: int


@dataclass
class Record:
    """One run, as it is written to `runs.json.gz`. Sizes are bytes; `written` and `sockets` are per round."""

    case: Case
    failed: bool
    round_seconds: list[float]
    cpu: dict[str, float]
    peaks: dict[str, int]
    written: float
    sockets: float
    scratch_peak: int
    page_cache_growth: int
    timeline: list[tuple[float, int]]

    @property
    def round(self) -> float:
        """Seconds of a round, mean of all."""
        return mean(self.round_seconds)

    @property
    def later_round(self) -> float:
        """Seconds of a round but the first, in which each process allocates its memory."""
        return mean(self.round_seconds[1:] or self.round_seconds)

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of all processes."""
        return sum(self.cpu.values())

    def cpu_of(self, *roles: str) -> float:
        """Return the CPU seconds of some roles."""
        return sum(self.cpu.get(role, 0.0) for role in roles)

    @property
    def server_peak(self) -> int:
        """Most anonymous memory of the server's job process."""
        return self.peaks["server"]


class Spread(NamedTuple):
    """Median, lowest and highest value of the runs of a case."""

    median: float
    low: float
    high: float


def over_runs(runs: Sequence[Record], value: Callable[[Record], float]) -> Spread:
    """Return the median over runs of a number that each run has once, and the range."""
    values = [value(run) for run in runs]
    return Spread(median(values), min(values), max(values))


def ratio(runs: Sequence[Record], stock: Sequence[Record], value: Callable[[Record], float]) -> float:
    """Return a number divided by the number of stock NVFlare."""
    return over_runs(runs, value).median / over_runs(stock, value).median


Groups = Mapping[Case, list[Record]]


def grouped(records: Sequence[Record]) -> Groups:
    """Return the runs of each case that did not fail."""
    groups: dict[Case, list[Record]] = defaultdict(list)
    for record in records:
        if not record.failed:
            groups[record.case].append(record)
    return groups


def render(records: Sequence[Record], about: Mapping[str, Any], out: Path) -> None:
    """Write the report and the pictures."""
    groups = grouped(records)
    lines = [
        "# One federated job, stock NVFlare and nvflare-lazy",
        "",
        f"`{about['command']}`",
        "",
        *(f"- {name}: {text}" for name, text in about["machine"].items()),
        "",
        *_explanation(about),
        "",
        *_noise(list(groups.values())),
        *(
            f"A run of {charts.NAMES[r.case.mode]} with {r.case.clients} clients and {r.case.mib:g} MiB "
            f"({r.case.env}) failed and does not count.\n"
            for r in records
            if r.failed
        ),
    ]
    for env, title in _ENVIRONMENTS.items():
        modes = _modes(groups, env)
        if modes:
            case = next(iter(modes.values()))[0].case
            lines += [f"## {title}", "", f"{case.mib:g} MiB, {case.clients} clients, {case.rounds} rounds.", ""]
            lines += [*_rounds_table(modes), ""]
    if any(case.table == "memory" for case in groups):
        lines += ["## Memory of the server", "", "In the simulator; each case ran once.", ""]
        lines += [*_memory_table(groups), ""]
    if limits := required(records):
        lines += ["## Limits", "", *limits, ""]
    out.mkdir(parents=True, exist_ok=True)
    lines += [f"![{text}]({name})" for name, text in _pictures(groups, out)]
    (out / "README.md").write_text("\n".join([*lines, ""]))


def _explanation(about: Mapping[str, Any]) -> list[str]:
    sockets = (
        "The job had its own network namespace, so no other traffic is counted."
        if about["separate"]
        else "Other programs' traffic on this machine is included, because only root may make a network namespace."
    )
    return wrap(
        "Level 1 adds `TensorOffload` to the server, level 2 also the lazy aggregator and persistor, level 3 also "
        '`TensorOffload` to the clients. "Server apart" is level 3 with another scratch root for the server, so that '
        "it exchanges no files with the sites, as if it were on another host. The time of a round is the mean over the "
        "rounds of a run; a later round excludes the first, in which each process allocates its memory. CPU seconds "
        "are those of all processes from the submission of the job to its end, start-up of its processes included. "
        "Memory is the peak anonymous memory (RssAnon) of one process. Written are the bytes given to write calls in a "
        "round, whether or not they reached the disk. Over sockets are the bytes that loopback carried in a round. "
        f"{sockets} Every number is the median over runs of one number for each run, in tables and in pictures, with "
        "the range in brackets and the ratio to NVFlare in memory.",
        120,
    )


def _noise(cases: list[list[Record]]) -> list[str]:
    """Say how far apart repetitions are: by that a single run, and another run of the command, can be judged."""
    repeated = [runs for runs in cases if len(runs) > 1]
    if not repeated:
        return ["Every case ran once, so the noise is unknown.", ""]

    def noise(value: Callable[[Record], float]) -> str:
        spreads = [over_runs(runs, value) for runs in repeated]
        return f"{max(max(s.high / s.median - 1, 1 - s.low / s.median) for s in spreads):.0%}"

    return [
        f"Noise: runs differ from their median by up to {noise(lambda r: r.round)} in the time of a round, "
        f"{noise(lambda r: r.cpu_seconds)} in CPU",
        f"seconds and {noise(lambda r: r.server_peak)} in the server's peak.",
        "",
    ]


def _modes(groups: Groups, env: str) -> dict[str, list[Record]]:
    """Return the runs of each mode of one of the first two tables."""
    found = {case.mode: runs for case, runs in groups.items() if case.table == "rounds" and case.env == env}
    return {mode: found[mode] for mode in charts.NAMES if mode in found}


def _rounds_table(modes: Mapping[str, list[Record]]) -> Iterator[str]:
    every = [run for runs in modes.values() for run in runs]
    roles = {name: some for name, some in _ROLES.items() if max(run.cpu_of(*some) for run in every) >= 0.1}
    peaks = {name: role for name, role in _PEAKS.items() if any(role in run.peaks for run in every)}
    titles = ["mode", "runs", "a round", "a later round", "CPU seconds", *(f"CPU {name}" for name in roles)]
    titles += [*(f"memory of {name}" for name in peaks), "scratch", "written", "over sockets"]
    yield f"| {' | '.join(titles)} |"
    yield "|---|" + "---:|" * (len(titles) - 1)
    stock = modes.get("stock", [])
    for mode, runs in modes.items():
        cells = [charts.NAMES[mode], str(len(runs))]
        for value, unit in (
            (lambda r: r.round, " s"),
            (lambda r: r.later_round, " s"),
            (lambda r: r.cpu_seconds, ""),
        ):
            cells.append(_beside(runs, stock, value, unit))
        cells += [f"{over_runs(runs, lambda r, some=some: r.cpu_of(*some)).median:.1f}" for some in roles.values()]
        sizes = [lambda r, role=role: r.peaks.get(role, 0) for role in peaks.values()]
        sizes += [lambda r: r.scratch_peak, lambda r: r.written, lambda r: r.sockets]
        cells += [_mib(runs, size) for size in sizes]
        yield f"| {' | '.join(cells)} |"


def _memory_table(groups: Groups) -> Iterator[str]:
    titles = ("clients", "model", "mode", "server", "highest client", "scratch", "page cache", "a round")
    yield f"| {' | '.join(titles)} |"
    yield "|---:|---:|---|" + "---:|" * (len(titles) - 3)
    for case, runs in sorted(groups.items(), key=lambda item: (item[0].mib, item[0].clients)):
        if case.table == "memory" and case.env == "sim":
            model = f"{case.mib:.0f} MiB" if case.mib >= 1 else "4 KiB"
            sizes = (lambda r: r.server_peak, lambda r: r.peaks["client"], lambda r: r.scratch_peak)
            cells = [str(case.clients), model, charts.NAMES[case.mode], *(_mib(runs, size) for size in sizes)]
            cells += [_mib(runs, lambda r: r.page_cache_growth), _beside(runs, [], lambda r: r.round, " s")]
            yield f"| {' | '.join(cells)} |"


def _mib(runs: Sequence[Record], value: Callable[[Record], float]) -> str:
    return f"{over_runs(runs, value).median / MIB:.0f} MiB"


def _beside(runs: Sequence[Record], stock: Sequence[Record], value: Callable[[Record], float], unit: str) -> str:
    """Return a number with its range and its ratio to stock NVFlare."""
    mine = over_runs(runs, value)
    extent = f" ({mine.low:.1f} to {mine.high:.1f})" if len(runs) > 1 else ""
    beside = f", {ratio(runs, stock, value):.2f} ×" if stock and runs is not stock else ""
    return f"{mine.median:.1f}{unit}{extent}{beside}"


# Environment, mode, name, and the limits of a later round and CPU as multiples of stock NVFlare. The first round is not
# limited: most of it is the start of NVFlare processes, which takes as long with a model of 4 KiB.
_MOST_TIMES_STOCK = (
    ("poc", "level-3", "deployment, both ends", 0.55, 0.6),
    ("poc", APART, "deployment, both ends, server apart", 0.8, 0.85),
    ("poc", "level-2", "deployment, server only (level 2)", 0.9, 1.0),
    ("poc", "level-1", "deployment, one component (level 1)", 1.0, 1.1),
    ("sim", "level-3", "simulator, both ends", 0.35, 0.4),
    ("sim", "level-1", "simulator, one component (level 1)", 1.0, 1.1),
)
# With smaller models, the start of processes and polling intervals take most of the time.
_LEAST_MIB = 512
_MOST_ABOVE_IDLE = {"server": 192 * MIB, "client": 64 * MIB}


def required(records: Sequence[Record]) -> list[str]:
    """Return a table of the limits that the package must keep, as far as these runs measured them."""
    groups = {case: runs for case, runs in grouped(records).items() if case.table == "memory" or case.mib >= _LEAST_MIB}
    rows = [*_times_stock(groups), *_written(groups), *_above_idle(groups)]
    if not rows:
        return []
    return [
        "| | at most | measured | |",
        "|---|---:|---:|---|",
        *(
            f"| {name} | {most:{form}} | {value:{form}} | {'pass' if value <= most else '**fail**'} |"
            for name, form, most, value in rows
        ),
    ]


_Row = tuple[str, str, float, float]


def _times_stock(groups: Groups) -> Iterator[_Row]:
    for env, mode, name, *limits in _MOST_TIMES_STOCK:
        modes = _modes(groups, env)
        if mode in modes and "stock" in modes:
            for what, value, most in zip(
                ("a later round", "CPU"), (lambda r: r.later_round, lambda r: r.cpu_seconds), limits, strict=True
            ):
                # As it is printed.
                yield f"{name}: {what}, × stock", ".2f", most, round(ratio(modes[mode], modes["stock"], value), 2)


def _written(groups: Groups) -> Iterator[_Row]:
    for env in _ENVIRONMENTS:
        if runs := _modes(groups, env).get("level-3"):
            name = f"{env}, both ends on one host: MiB written in a round, (clients + 1) × model"
            case = runs[0].case
            yield name, ".0f", (case.clients + 1) * case.mib, round(over_runs(runs, lambda r: r.written).median / MIB)


def _above_idle(groups: Groups) -> Iterator[_Row]:
    for env in _ENVIRONMENTS:
        idle = [run for case, runs in groups.items() if case.env == env and case.mib < 1 for run in runs]
        lazy = [
            run
            for case, runs in groups.items()
            if case.env == env and case.mib >= 1 and case.mode in ("level-2", "level-3", APART)
            for run in runs
        ]
        # Only in a deployment does a client job forward tensors; in the simulator it trains.
        for role, name in (("server", "server"), ("client", "client job that forwards"))[: 2 if env == "poc" else 1]:
            forwarding = [run for run in lazy if role == "server" or run.case.mode != "level-2"]
            if idle and forwarding:
                most = max(run.peaks[role] for run in forwarding) - over_runs(idle, lambda r, k=role: r.peaks[k]).median
                yield f"{env}, {name}: MiB above idle, highest run", ".0f", _MOST_ABOVE_IDLE[role] / MIB, most / MIB


def _pictures(groups: Groups, out: Path) -> Iterator[tuple[str, str]]:
    """Draw all pictures and yield the name and the subject of each."""
    for axis, x, fixed in (
        ("clients", lambda case: case.clients, lambda case: case.mib == 256),
        ("model in MiB", lambda case: case.mib, lambda case: case.clients == 2),
    ):
        rows: dict[str, dict[float, Spread]] = defaultdict(dict)
        for case, runs in groups.items():
            if case.table == "memory" and case.mib >= 1 and fixed(case):
                rows[case.mode][x(case)] = over_runs(runs, lambda r: r.server_peak)
        if rows:
            name = f"{axis.partition(' ')[0]}.png"
            title = "256 MiB model" if axis == "clients" else "2 clients"
            charts.peaks(rows, out / name, f"FedAvg in the simulator, {title}", axis)
            yield name, f"peak memory by {axis.partition(' ')[0]}"
    modes = _modes(groups, "poc")
    if modes:
        case = next(iter(modes.values()))[0].case
        title = f"FedAvg, deployment with external trainers, {case.mib:g} MiB model, {case.clients} clients"
        # The run whose peak is nearest to the median, with an odd number of runs the median itself.
        middle = {mode: sorted(runs, key=lambda r: r.server_peak)[len(runs) // 2] for mode, runs in modes.items()}
        charts.timeline(
            {mode: (run.timeline, run.server_peak) for mode, run in middle.items()}, out / "timeline.png", title
        )
        yield "timeline.png", "memory over time"
        for name, value, axis in (
            ("rounds.png", lambda r: r.round, "seconds per round"),
            ("cpu.png", lambda r: r.cpu_seconds, "CPU seconds of all processes"),
        ):
            charts.bars({mode: over_runs(runs, value) for mode, runs in modes.items()}, out / name, title, axis)
            yield name, f"{axis}"
