# SPDX-License-Identifier: Apache-2.0
"""The cost of aggregation, compared with the limit of the machine, NVFlare and NumPy.

    python -m benchmarks.aggregate                  # all parts, with 4 contributors of 1 GiB
    python -m benchmarks.aggregate limits --mib 256 # one part, smaller

Parts:
  limits   the weighted mean in float32 and bfloat16, and the median of 16 contributors of a quarter of the size. None
           waits for the disk. From the page cache, the limit reads all contributions once and writes a result, on all
           cores, with and without the arithmetic. From the disk, the limit reads them once, file by file. Stock NVFlare
           materializes every tensor, adds with its WeightedAggregationHelper, and saves with torch.save.
  memory   peak anonymous memory over budgets, sizes and numbers of contributors, each in a separate process.
  rules    median, trimmed mean and Krum of 8 contributors of half the size, compared with NumPy in memory.
  small    20,000 tensors of a few hundred elements.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import nvflare_lazy
from benchmarks.aggregation_limits import (
    Arithmetic,
    Median,
    NoArithmetic,
    Sum,
    compute,
    make_cold,
    read_compute_write,
    read_once,
)
from benchmarks.machine import describe_machine
from benchmarks.measuring import MIB, FullPageCache, PeakMemory, Turn, in_turns, read_files
from nvflare_lazy.aggregation import Aggregation
from tests.measure import rss_anon

ENGINE = "nvflare-lazy"
EXAMPLES = (1300, 250, 870, 410, 90, 333, 721, 1024)


class Contributors:
    """Contributions in files, as a server has them after receiving.

    Args:
        folder: Where they are.
        count: How many contributors.
        mib: Size of each.
        dtype: The type of all tensors.
        tensors: How many tensors each has.
    """

    def __init__(self, folder: Path, count: int, mib: float, dtype: torch.dtype, tensors: int = 64) -> None:
        self.nbytes = int(mib * MIB)
        self.dtype = dtype
        numel = self.nbytes // dtype.itemsize // tensors
        self.paths = []
        for number in range(count):
            path = folder / f"{str(dtype)[6:]}-{mib:g}-{tensors}-{number:02d}.safetensors"
            self.paths.append(path)
            if not path.exists():
                torch.manual_seed(number)
                values = {f"layer.{index:05d}.weight": torch.randn(numel).to(dtype) for index in range(tensors)}
                nvflare_lazy.save(values, path)
        self.weights = {path.stem: float(EXAMPLES[number % 8]) for number, path in enumerate(self.paths)}

    def open(self) -> dict[str, nvflare_lazy.LazyTensorDict]:
        """Open them."""
        return {path.stem: nvflare_lazy.open(path) for path in self.paths}

    def warm(self) -> None:
        """Bring them into the page cache, and let the disk come to rest."""
        read_files(self.paths)
        os.sync()


def engine(contributors: Contributors, out: Path, rule: object = "mean", **settings: object) -> None:
    """Aggregate with this project."""
    weights = contributors.weights if rule == "mean" else None
    Aggregation(rule, fsync=False, **settings).run(contributors.open(), out, weights=weights)


def stock(contributors: Contributors, out: Path) -> None:
    """Aggregate with NVFlare's helper, and save with torch."""
    from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper

    helper = WeightedAggregationHelper()
    for name, tensors in contributors.open().items():
        # The helper calls materialize() on each of them.
        helper.add(tensors, contributors.weights[name], name, 0)
    torch.save(helper.get_result(), out)


def show(seconds: Mapping[str, list[Turn]], reference: str, nbytes: int) -> None:
    """Print the median time of each with its range, its processor time, and the ratio to one of them."""
    base = statistics.median(seconds[reference])
    for name, times in seconds.items():
        median = statistics.median(times)
        cpu = statistics.median(turn.cpu_seconds for turn in times)
        rate = nbytes / median / 1e9
        print(
            f"  {name:20} {median:7.2f} s  ({min(times):.2f} to {max(times):.2f})  CPU {cpu:6.2f} s  "
            f"{rate:6.2f} GB/s read  {median / base:6.2f} × {reference}",
            flush=True,
        )


def judge(seconds: Mapping[str, list[Turn]], limit: str, most: float) -> None:
    """Print whether the engine takes at most a given multiple of the time of a limit."""
    clock = statistics.median(seconds[ENGINE]) / statistics.median(seconds[limit])
    cpu = [statistics.median(turn.cpu_seconds for turn in seconds[name]) for name in (ENGINE, limit)]
    verdict = "holds" if clock <= most else "does not hold"
    print(f"  at most {most} × {limit}: {verdict}, {clock:.2f} (of the CPU time {cpu[0] / cpu[1]:.2f})", flush=True)


@dataclass(frozen=True)
class LimitCase:
    """An aggregation, the arithmetic that it cannot do without, and how many times the limit it may take."""

    rule: str
    dtype: torch.dtype
    arithmetic: type[Arithmetic]
    most: float
    share: int = 1  # of the contributors, and of the size of each


CASES = (
    LimitCase("mean", torch.float32, Sum, 1.1),
    LimitCase("mean", torch.bfloat16, Sum, 1.25),
    LimitCase("median", torch.float32, Median, 1.1, share=4),
)
MOST_COLD = 1.1


def measure_limits(folder: Path, options: argparse.Namespace) -> None:
    """Time aggregation against the limits of the machine, and the mean against stock NVFlare."""
    out = folder / "out"
    for case in CASES:
        count, mib = options.contributors * case.share, options.mib // case.share
        contributors = Contributors(folder, count, mib, case.dtype)
        needed = (count + 4) * contributors.nbytes
        what = f"{case.rule} of {count} × {mib} MiB {str(case.dtype)[6:]}, not waiting for the disk"
        measure_warm(case, contributors, out, options.rounds, f"\n{what}, from the page cache:")
        with FullPageCache(needed, folder) as page_cache:
            measure_cold(case, contributors, out, options.rounds, page_cache, f"\n{what}, from the disk:")
        for path in contributors.paths:
            path.unlink()


def measure_warm(case: LimitCase, contributors: Contributors, out: Path, rounds: int, title: str) -> None:
    """Time one case with contributions in the page cache. A result takes the memory of the one before it."""
    cores = len(os.sched_getaffinity(0))
    count, nbytes, dtype = len(contributors.paths), contributors.nbytes, case.dtype

    def plain(arithmetic: type[Arithmetic]) -> None:
        read_compute_write(contributors.paths, nbytes, dtype, arithmetic, out, cores)

    def clear() -> None:
        out.unlink(missing_ok=True)
        os.sync()

    rivals: dict[str, Callable[[], object]] = {
        "read and write": lambda: plain(NoArithmetic),
        "compute": lambda: compute(count, nbytes, dtype, case.arithmetic, cores),
        "read, compute, write": lambda: plain(case.arithmetic),
        ENGINE: lambda: engine(contributors, out, case.rule),
    }
    if case.rule == "mean":
        rivals["stock NVFlare"] = lambda: stock(contributors, out)
    contributors.warm()
    print(title, flush=True)
    in_turns(rivals, 1, clear)
    seconds = in_turns(rivals, rounds, clear)
    clear()
    show(seconds, "read and write", nbytes * count)
    for limit in ("read and write", "read, compute, write"):
        judge(seconds, limit, case.most)


def measure_cold(
    case: LimitCase, contributors: Contributors, out: Path, rounds: int, page_cache: FullPageCache, title: str
) -> None:
    """Time one case with contributions that are not in the page cache."""

    def clear() -> None:
        out.unlink(missing_ok=True)
        os.sync()
        make_cold(contributors.paths)
        page_cache.refill()

    rivals: dict[str, Callable[[], object]] = {
        "read once": lambda: read_once(contributors.paths, direct=False),
        "read once, O_DIRECT": lambda: read_once(contributors.paths, direct=True),
        ENGINE: lambda: engine(contributors, out, case.rule),
    }
    print(title, flush=True)
    seconds = in_turns(rivals, rounds, clear)
    clear()
    show(seconds, "read once", contributors.nbytes * len(contributors.paths))
    for limit in ("read once", "read once, O_DIRECT"):
        judge(seconds, limit, MOST_COLD)


def measure_memory(folder: Path, options: argparse.Namespace) -> None:
    """Measure peak memory over budgets, sizes and numbers of contributors."""
    print("\npeak anonymous memory above what the process has before:", flush=True)
    small, large = options.mib // 4, options.mib * 2
    cases = [
        (count, mib, budget) for budget in ("64MiB", "256MiB") for count, mib in ((4, small), (4, large), (16, small))
    ]
    for count, mib, budget in cases:
        for rule in ("mean", "median"):
            contributors = Contributors(folder, count, mib, torch.float32)
            command = [sys.executable, "-m", "benchmarks.aggregate", "--measure", budget, rule, str(folder / "out")]
            done = subprocess.run(
                [*command, *map(str, contributors.paths)], check=True, stdout=subprocess.PIPE, text=True
            )
            print(f"  {rule:8} {count:3} × {mib:5} MiB, budget {budget:>6}: {done.stdout.strip():>6} MiB", flush=True)
        if mib == large:
            for path in contributors.paths:
                path.unlink()


def measure_once(budget: str, rule: str, out: str, *paths: str) -> None:
    """Aggregate once, and print by how many MiB anonymous memory grew."""
    contributions = {Path(path).stem: nvflare_lazy.open(path) for path in paths}
    with PeakMemory() as memory:
        Aggregation(rule, memory_budget=budget, fsync=False).run(contributions, out)
    os.unlink(out)
    print(f"{memory.growth / MIB:.1f}")


def measure_rules(folder: Path, options: argparse.Namespace) -> None:
    """Time robust rules, and NumPy's with everything in memory."""
    contributors = Contributors(folder, 8, options.mib // 2, torch.float32)
    print(f"\n8 × {options.mib // 2} MiB float32, NumPy has all of it in memory before its clock starts:", flush=True)
    contributors.warm()
    for rule in (
        {"name": "median"},
        {"name": "trimmed_mean", "num_byzantine": 2},
        {"name": "krum", "num_byzantine": 2},
    ):
        seconds, grown = [], 0
        for _ in range(options.rounds):
            with PeakMemory(0.01) as memory:
                start = time.perf_counter()
                engine(contributors, folder / "out", rule)
                seconds.append(time.perf_counter() - start)
            grown = max(grown, memory.growth)
        print(
            f"  {rule['name']:14} {statistics.median(seconds):7.2f} s  ({min(seconds):.2f} to {max(seconds):.2f})"
            f"   {grown / MIB:6.0f} MiB",
            flush=True,
        )
    before = rss_anon()
    loaded = np.stack(
        [
            np.concatenate([np.frombuffer(tensor.source.read(), np.float32) for tensor in tensors.values()])
            for tensors in contributors.open().values()
        ]
    )
    for name, run in (("median", numpy_median), ("trimmed_mean", numpy_trimmed_mean), ("krum", numpy_krum)):
        with PeakMemory(0.01) as memory:
            start = time.perf_counter()
            run(loaded)
            taken = time.perf_counter() - start
        held = (rss_anon() - before + memory.growth) / MIB
        print(f"  {name:14} {taken:7.2f} s  in NumPy{'':12} {held:6.0f} MiB", flush=True)


def numpy_median(loaded: np.ndarray) -> np.ndarray:
    """As a user would write it."""
    return np.median(loaded, axis=0)


def numpy_trimmed_mean(loaded: np.ndarray) -> np.ndarray:
    """As a user would write it."""
    return np.sort(loaded, axis=0)[2:-2].mean(axis=0, dtype=np.float64).astype(np.float32)


def numpy_krum(loaded: np.ndarray) -> np.ndarray:
    """As a user would write it, without room for differences in float64."""
    count = len(loaded)
    distances = np.zeros((count, count))
    for i in range(count):
        for j in range(i):
            difference = loaded[i] - loaded[j]
            distances[i, j] = distances[j, i] = np.dot(difference, difference)
    return loaded[np.argmin(np.sort(distances, axis=1)[:, 1 : count - 2 - 2 + 1].sum(axis=1))]


def measure_small(folder: Path, options: argparse.Namespace) -> None:
    """Time very many very small tensors."""
    contributors = Contributors(folder, 4, 20_000 * 256 * 4 / MIB, torch.float32, tensors=20_000)
    print("\nmean of 4 × 20,000 tensors of 256 float32, not waiting for the disk:", flush=True)
    rivals = {
        "stock NVFlare": lambda: stock(contributors, folder / "out"),
        "nvflare-lazy": lambda: engine(contributors, folder / "out"),
    }
    show(in_turns(rivals, options.rounds), "stock NVFlare", contributors.nbytes * 4)


PARTS = {"limits": measure_limits, "memory": measure_memory, "rules": measure_rules, "small": measure_small}


def main() -> None:
    """Measure what the command line asks for."""
    if sys.argv[1:2] == ["--measure"]:
        measure_once(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="what to measure; all, if not given")
    parser.add_argument("--mib", type=int, default=1024, help="size of a contribution")
    parser.add_argument("--contributors", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="where to write; takes about 16 contributions")
    options = parser.parse_args()
    print("\n".join(f"{name}: {value}" for name, value in describe_machine().items()))
    with tempfile.TemporaryDirectory(prefix="nvflare_lazy_bench_", dir=options.directory) as folder:
        for part in options.parts or PARTS:
            PARTS[part](Path(folder), options)


if __name__ == "__main__":
    main()
