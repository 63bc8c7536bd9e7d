# SPDX-License-Identifier: Apache-2.0
"""The same federated job on stock NVFlare and on every level of nvflare-lazy, watched from outside.

    result = run(FLJob(mode="level-2", clients=4, model_mib=1024, tensors=64), directory)
    result.server_peak, result.round_seconds, result.samples

`python -m benchmarks.fl_job --mode stock lazy --clients 4` prints one line for each run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.fl_job.job import MODES, FLJob
from benchmarks.fl_job.result import MIB, RunResult
from benchmarks.fl_job.sampling import Sample, Sampler
from benchmarks.fl_job.simulator import run_in_simulator

__all__ = ["MIB", "MODES", "FLJob", "RunResult", "Sample", "Sampler", "run", "run_in_simulator"]


def run(job: FLJob, directory: Path, env: str = "sim", **arguments: Any) -> RunResult:
    """Run a job in the simulator ("sim") or in a local deployment with real sites ("poc")."""
    if env == "sim":
        return run_in_simulator(job, directory, **arguments)
    from benchmarks.fl_job.poc import run_in_poc

    return run_in_poc(job, directory, **arguments)
