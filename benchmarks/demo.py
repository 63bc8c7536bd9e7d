# SPDX-License-Identifier: Apache-2.0
"""`make demo`: the same federated job on stock NVFlare and on nvflare-lazy, with a chart of memory and a report."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import mean

from benchmarks import charts
from benchmarks.fl_job import MIB, FLJob, RunResult, run
from nvflare_lazy.report import RecordFile, read_job, summarize
from nvflare_lazy.report.page import page

MODES = ("stock", "level-2", "level-3")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--model-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("demo.png"))
    options = parser.parse_args()
    print(
        f"FedAvg in NVFlare's simulator: a model of {options.model_mib} MiB, {options.clients} clients, "
        f"{options.rounds} rounds. The same job {len(MODES)} times:",
        flush=True,
    )
    results: list[RunResult] = []
    records: list[RecordFile] = []
    for mode in MODES:
        print(f"  {charts.NAMES[mode]} ...", end=" ", flush=True)
        directory = Path(tempfile.mkdtemp(prefix="nvflare-lazy-demo-"))
        try:
            result = run(
                FLJob(
                    mode=mode, clients=options.clients, model_mib=options.model_mib, rounds=options.rounds, tensors=32
                ),
                directory,
            )
            if mode != "stock" and result.ok:
                records = read_job(result.workspace)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        if not result.ok:
            print(f"failed\n{result.output[-3000:]}")
            return 1
        print(f"{result.seconds:.0f} s", flush=True)
        results.append(result)
    print()
    print(f"  {'':34}{'server memory, peak':>22}{'a round takes':>16}{'scratch on disk':>18}")
    for result in results:
        print(
            f"  {charts.NAMES[result.job.mode]:34}{result.server_peak / MIB:>18.0f} MiB"
            f"{mean(result.round_seconds):>14.1f} s{result.scratch_peak / MIB:>14.0f} MiB"
        )
    charts.timeline(
        {result.job.mode: (result.server_timeline, result.server_peak) for result in results},
        options.out,
        f"Server memory of one FedAvg job: {options.model_mib} MiB model, {options.clients} clients, "
        f"{options.rounds} rounds, simulator",
    )
    report = options.out.with_suffix(".html")
    report.write_text(page(summarize(records)), encoding="utf-8")
    print(f"\nThe chart is in {options.out.resolve()}")
    print(f"The report of the last job is in {report.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
