# SPDX-License-Identifier: Apache-2.0
"""Swarm learning on stock NVFlare and on nvflare-lazy: memory of every process, time of a round, CPU.

    python -m benchmarks.swarm                      a model of 256 MiB, 3 clients, with trainers in and out of process
    python -m benchmarks.swarm --mib 64 --repeats 1

Modes alternate, so that what else the machine does meets all of them alike. Writes a table in Markdown to `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from statistics import mean, median
from textwrap import wrap
from typing import NamedTuple

from benchmarks.fl_job import MIB, RunResult, run_in_simulator
from benchmarks.fl_job.result import read_records
from benchmarks.fl_job.swarm_job import SwarmJob
from benchmarks.machine import describe_machine

MODES = {"stock": "NVFlare, in memory", "level-1": "nvflare-lazy, level 1", "level-2": "nvflare-lazy, level 2"}
_BOUNDARY = re.compile(r"Round (\d+) started|Swarm Learning (Done)")


class Numbers(NamedTuple):
    """What one run came to: bytes and seconds."""

    server: int
    client: int
    trainer: int
    round: float
    later_round: float
    cpu: float


def measure(mode: str, *, external: bool, clients: int, mib: float, rounds: int) -> Numbers:
    """Run one case."""
    directory = Path(tempfile.mkdtemp(prefix="nvflare-lazy-bench-"))
    try:
        job = SwarmJob(mode=mode, clients=clients, model_mib=mib, tensors=32, rounds=rounds, external=external)
        result = run_in_simulator(job, directory)
        if not result.ok:
            raise RuntimeError(f"{mode} failed:\n{result.output[-3000:]}")
        seconds = list(round_seconds(result))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return Numbers(
        result.server_peak,
        result.client_peak,
        result.peak("trainer"),
        mean(seconds),
        mean(seconds[1:] or seconds),
        result.cpu_seconds,
    )


def round_seconds(result: RunResult) -> Iterator[float]:
    """Yield the seconds of each round: it starts when the first client starts it."""
    times: dict[int, float] = {}
    for path in result.workspace.glob("site-*/log.json"):
        for record in read_records(path):
            if match := _BOUNDARY.search(record["message"]):
                number = result.job.rounds if match[2] else int(match[1])
                time = datetime.strptime(record["asctime"], "%Y-%m-%d %H:%M:%S,%f").timestamp()
                times[number] = min(time, times.get(number, time))
    for number in range(result.job.rounds):
        yield times[number + 1] - times[number]


def table(runs: dict[tuple[bool, str], list[Numbers]]) -> Iterator[str]:
    """Yield the lines of a table: medians, and ratios to NVFlare's of the same kind of trainer."""
    titles = ("trainers", "mode", "server", "highest client", "trainer", "a round", "a later round", "CPU seconds")
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for (external, mode), found in runs.items():
        numbers = Numbers(*map(median, zip(*found, strict=True)))
        stock = Numbers(*map(median, zip(*runs[external, "stock"], strict=True)))
        times = [
            f"{mine:.1f}{unit}" if mode == "stock" else f"{mine:.1f}{unit}, {mine / theirs:.2f} ×"
            for mine, theirs, unit in zip(numbers[3:], stock[3:], (" s", " s", ""), strict=True)
        ]
        trainer = f"{numbers.trainer / MIB:.0f} MiB" if external else "in the client"
        yield (
            f"| {'external' if external else 'in process'} | {MODES[mode]} | {numbers.server / MIB:.0f} MiB "
            f"| {numbers.client / MIB:.0f} MiB | {trainer} | {' | '.join(times)} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swarm", description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=float, default=256)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/bench/swarm.md"))
    options = parser.parse_args()
    load = os.getloadavg()[0]
    runs: dict[tuple[bool, str], list[Numbers]] = defaultdict(list)
    for _ in range(options.repeats):
        for external in (False, True):
            for mode in MODES:
                found = measure(
                    mode, external=external, clients=options.clients, mib=options.mib, rounds=options.rounds
                )
                runs[external, mode].append(found)
                print(json.dumps({"mode": mode, "external": external, **found._asdict()}), flush=True)
    lines = [
        "# Swarm learning, stock NVFlare and nvflare-lazy",
        "",
        f"`{' '.join(['python -m benchmarks.swarm', *sys.argv[1:]])}`",
        "",
        *(f"- {name}: {text}" for name, text in describe_machine().items()),
        f"- load: {load:.1f} at the start and {os.getloadavg()[0]:.1f} at the end (processes that run or wait)",
        "",
        *wrap(
            f"A model of {options.mib:g} MiB, {options.clients} clients, {options.rounds} rounds in the simulator. "
            "Level 1 is NVFlare's recipe with `make_lazy(recipe, level=1)`, level 2 is `SwarmLearningRecipe`. Memory "
            "is the peak anonymous memory (RssAnon) of one process. A client is its job process; the table has the "
            "highest of all clients. Times are means of rounds, CPU is of all processes. Each number is "
            + (
                f"the median of {options.repeats} runs, and modes alternate."
                if options.repeats > 1
                else "from one run."
            ),
            120,
        ),
        "",
        *table(runs),
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join([*lines, ""]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
