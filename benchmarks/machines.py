# SPDX-License-Identifier: Apache-2.0
"""Aggregation by worker processes: measured on this machine, and computed from that for 2 to 64 machines.

    python -m benchmarks.machines
    python -m benchmarks.machines --network 3.1 --storage 20 100 --cores 16
    python -m benchmarks.machines --workers 1                  # worker processes; default: one per core

Measured, from the page cache and without waiting for the disk: one process with a thread per core, and worker processes
with one thread each, with the weighted mean and the median. Both must write the same bytes. Also measured: the start of
the workers, and models of 1 MiB, whose time is the time of the process that calls `aggregate()`.

Computed for one aggregation of large models on storage that the machines share:

    seconds = start + caller + read / rate + written / min(machines * network, storage)
    rate = min(machines * min(network, cores * rate of a core) * busy, storage)
    busy = parts / (rounds of parts * workers)

A part is read by one worker. All parts have the same size, so the last round of parts may leave workers without one.
Reading, computing and writing of different parts overlap in practice; the formula adds the time for writing, and so is
cautious. It has no term for a network between workers: they exchange no tensors.
"""

from __future__ import annotations

import argparse
import filecmp
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import nvflare_lazy
from benchmarks.machine import describe_machine
from benchmarks.measuring import MIB, in_turns
from nvflare_lazy._system import available_cores
from nvflare_lazy._text import parse_size
from nvflare_lazy.aggregation import Aggregation
from nvflare_lazy.aggregation.executors import Workers

RULES = ("mean", "median")
MACHINES = (1, 2, 4, 8, 16, 32, 64)
ONE, WORKERS = "one process", "worker processes"


@dataclass(frozen=True)
class Constants:
    """Measurements on this machine.

    Args:
        per_core: Bytes of contributions that a worker of one core reads and aggregates per second, by rule.
        start: Seconds until all workers have started.
        caller: Seconds of an aggregation that has next to no bytes.
    """

    per_core: Mapping[str, float]
    start: float
    caller: float


@dataclass(frozen=True)
class Cluster:
    """Equal machines and storage that they share.

    Args:
        cores: Cores of a machine, each with one worker.
        network: Bytes per second between a machine and the storage, in each direction.
        storage: Bytes per second of the storage, for all machines together.
    """

    cores: int
    network: float
    storage: float

    def seconds(
        self, machines: int, rule: str, read: float, written: float, part: float, constants: Constants
    ) -> float:
        """Return the time of an aggregation."""
        workers = machines * self.cores
        parts = read / part
        busy = parts / (math.ceil(parts / workers) * workers)
        rate = min(machines * min(self.network, self.cores * constants.per_core[rule]) * busy, self.storage)
        writing = written / min(machines * self.network, self.storage)
        return constants.start + constants.caller + read / rate + writing


def measure(mib: int, count: int, rounds: int, number: int) -> Constants:
    """Measure this machine with a number of workers, and print the results."""
    with tempfile.TemporaryDirectory(prefix="nvflare_lazy_bench_") as folder:
        inputs = _contributions(Path(folder, "large"), mib, count)
        tiny = _contributions(Path(folder, "tiny"), 1, count)
        outs = {name: Path(folder, f"{name}.safetensors") for name in (ONE, WORKERS)}
        with Workers({"name": "processes", "max_workers": number}) as workers:
            start = time.perf_counter()
            for future in [workers.executor.submit(_import) for _ in range(4 * number)]:
                future.result()
            started = time.perf_counter() - start
            print(f"start of {number} workers: {started:.2f} s")

            def run(name: str, rule: str, contributions: Mapping[str, object], **options: Any) -> Callable[[], object]:
                return lambda: Aggregation(rule, fsync=False, **options).run(contributions, outs[name])

            tiny_run = run(WORKERS, "mean", tiny, executor=workers)
            tiny_run()
            caller = statistics.median(in_turns({"tiny": tiny_run}, rounds)["tiny"])
            print(f"aggregation of {count} models of 1 MiB by the workers: {caller:.3f} s")
            per_core = {}
            for rule in RULES:
                rivals = {
                    ONE: run(ONE, rule, inputs),
                    WORKERS: run(WORKERS, rule, inputs, executor=workers),
                }

                def clean() -> None:
                    for out in outs.values():
                        out.unlink(missing_ok=True)
                    os.sync()

                for rival in rivals.values():
                    rival()
                if not filecmp.cmp(outs[ONE], outs[WORKERS], shallow=False):
                    raise SystemExit(f"{rule}: the workers wrote other bytes than one process")
                times = {name: statistics.median(turn) for name, turn in in_turns(rivals, rounds, before=clean).items()}
                print(f"{rule} of {count} models of {mib} MiB:")
                for name, seconds in times.items():
                    print(f"  {name:36} {seconds:.2f} s, {times[ONE] / seconds:.2f} × as fast as {ONE}")
                per_core[rule] = count * mib * MIB / max(times[WORKERS] - caller, 1e-9) / number
                print(f"  a worker: {per_core[rule] / 1e9:.2f} GB/s")
    return Constants(per_core, started, caller)


def _import() -> None:
    import nvflare_lazy.aggregation  # noqa: F401


def _contributions(folder: Path, mib: int, count: int) -> dict[str, nvflare_lazy.LazyTensorDict]:
    folder.mkdir()
    found = {}
    for number in range(count):
        tensors = {f"layer{index}": torch.randn(mib * MIB // 16) for index in range(4)}
        found[f"site-{number}"] = nvflare_lazy.open(nvflare_lazy.save(tensors, folder / f"{number}.safetensors"))
    return found


def show(options: argparse.Namespace, constants: Constants) -> None:
    """Print the computed times as a table for a document."""
    size, part = options.model * 1e9, options.part_mib * MIB
    print(
        f"\n{options.contributions} contributions of {options.model:g} GB, {options.cores} cores per machine, ", end=""
    )
    print(f"{options.network:g} GB/s per machine\n")
    clusters = {gbs: Cluster(options.cores, options.network * 1e9, gbs * 1e9) for gbs in options.storage}
    columns = [(rule, gbs) for rule in RULES for gbs in clusters]
    print("| machines | " + " | ".join(f"{rule}, storage of {gbs:g} GB/s" for rule, gbs in columns) + " |")
    print("|---:|" + "---:|" * len(columns))
    for machines in MACHINES:
        times = [
            clusters[gbs].seconds(machines, rule, options.contributions * size, size, part, constants)
            for rule, gbs in columns
        ]
        print(f"| {machines} | " + " | ".join(f"{_duration(seconds)}" for seconds in times) + " |")


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 100 else f"{seconds:.0f} s"


def main() -> None:
    """Measure, and compute what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of each measured model")
    parser.add_argument("--count", type=int, default=8, help="number of measured models")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=available_cores(), help="number of measured worker processes")
    parser.add_argument("--model", type=float, default=140.0, help="computed: size of a contribution in GB")
    parser.add_argument("--contributions", type=int, default=10, help="computed: number of contributions")
    parser.add_argument("--cores", type=int, default=16, help="computed: cores of a machine")
    parser.add_argument("--network", type=float, default=2.5, help="computed: GB/s of a machine and the storage")
    parser.add_argument("--storage", type=float, nargs="+", default=[20.0, 100.0], help="computed: GB/s of the storage")
    parser.add_argument(
        "--part-mib",
        type=float,
        default=parse_size(Aggregation().part_size) / MIB,
        help="computed: bytes that a part reads",
    )
    options = parser.parse_args()
    print("\n".join(f"{name}: {value}" for name, value in describe_machine().items()) + "\n")
    show(options, measure(options.mib, options.count, options.rounds, options.workers))


if __name__ == "__main__":
    main()
