# SPDX-License-Identifier: Apache-2.0
"""A job with a model larger than memory: memory cgroups limit its processes, and every peak is printed.

    python -m benchmarks.larger_than_memory --limited server    the server job process, to an eighth of the model
    python -m benchmarks.larger_than_memory --limited all       server, clients and trainers, to a quarter of the model

The model is instantiated from its class. Two external trainers load, change and write one tensor at a time, for two
rounds; `--limited server` is a deployment, `--limited all` the simulator. The page cache counts. Needs permission to
make memory cgroups (root), and disk for ten models.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch

import nvflare_lazy
from benchmarks.fl_job import MIB, FLJob, RunResult, run_in_simulator
from benchmarks.fl_job.memory_group import MemoryGroup
from benchmarks.fl_job.poc import Deployment, run_in_poc
from benchmarks.fl_job.synthetic_model import initial_values, step
from benchmarks.machine import describe_machine

_TENSOR_MIB = 16
_CHECKED_TENSORS = 8
_HOURS = 2


class _Watch:
    """Moves processes into a group as they start, and notes the most anonymous memory of the group."""

    def __init__(self, group: MemoryGroup) -> None:
        self.anonymous = 0
        self._group = group
        self._members: set[int] = set()
        self._looked = 0.0

    def of_deployment(self, deployment: Deployment, job_id: str) -> None:
        """Limit the server job process, and the processes that it starts."""
        # Looking takes processor time, and later servers do not exist.
        if not self._members or time.monotonic() - self._looked > 1:
            servers = {pid for pid, role in deployment.roles().items() if role == "server"}
            for pid in servers - self._members:
                self._group.add(pid)
            self._members |= servers
            self._looked = time.monotonic()
        self.note()

    def note(self, *_: object) -> None:
        self.anonymous = max(self.anonymous, self._group.anonymous)


def run_limited(limited: str, job: FLJob, limit: int, directory: Path) -> tuple[RunResult, str]:
    """Run a job with a limit on the memory of its processes; return also a line about the group."""
    seconds = _HOURS * 3600
    with MemoryGroup(limit) as group:
        watch = _Watch(group)
        if limited == "server":
            result = run_in_poc(job, directory, timeout=seconds, during=watch.of_deployment)
        else:
            result = run_in_simulator(job, directory, timeout=seconds, during=watch.note, group=group)
        about = (
            f"{group.peak / MIB:.0f} MiB with the page cache, {watch.anonymous / MIB:.0f} MiB without; "
            f"limit {group.limit / MIB:.0f} MiB, killed processes: {group.killed}"
        )
    return result, about


def check(job: FLJob, path: Path) -> float:
    """Return the largest relative error of some tensors of the final model.

    Raises:
        AssertionError: A tensor is missing.
    """
    saved = nvflare_lazy.open(path)
    assert len(saved) == job.tensors, f"{len(saved)} of {job.tensors} tensors"
    sites = range(1, job.clients + 1)
    worst = 0.0
    for index in range(0, job.tensors, max(1, job.tensors // _CHECKED_TENSORS)):
        value = initial_values(index, job.elements)
        for _ in range(job.rounds):
            total = sum(step(value, site).double() * site for site in sites)
            assert isinstance(total, torch.Tensor)
            value = (total / sum(sites)).float()
        error = (saved[f"layer{index:05d}"].materialize() - value).abs() / value.abs().clamp_min(1e-3)
        worst = max(worst, float(error.max()))
    return worst


def show(result: RunResult) -> None:
    """Print the peak of every process."""
    peaks: dict[tuple[str, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for sample in result.samples:
        anonymous, file = peaks[sample.role, sample.pid]
        peaks[sample.role, sample.pid] = max(anonymous, sample.anon), max(file, sample.file)
    print("| process | peak RssAnon | peak RssFile |\n|---|---:|---:|")
    for (role, _), (anonymous, file) in sorted(peaks.items()):
        print(f"| {role} | {anonymous / MIB:.0f} MiB | {file / MIB:.0f} MiB |")


def main() -> int:
    """Run one case and print it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.larger_than_memory", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--limited", choices=("server", "all"), default="server")
    parser.add_argument("--limit-mib", type=int, help="default: 512 for the server, 1536 for all processes")
    parser.add_argument("--times", type=float, help="size of the model in limits; default: 8 for the server, 4 for all")
    parser.add_argument("--clients", type=int, default=2)
    options = parser.parse_args()
    limit, times = (512, 8.0) if options.limited == "server" else (1536, 4.0)
    limit, times = options.limit_mib or limit, options.times or times
    directory = Path(tempfile.mkdtemp(prefix="nvflare-lazy-bench-"))
    job = FLJob(
        mode="level-3",
        clients=options.clients,
        model_mib=limit * times,
        tensors=int(limit * times / _TENSOR_MIB),
        rounds=2,
        external=True,
        trainer=Path(__file__).parent / "fl_job" / "streaming_trainer.py",
        # On a busy machine, a trainer that reads and writes gigabytes is late with its heartbeats.
        executor={"heartbeat_timeout": 600.0},
        persistor={"checkpoint_dir": str(directory / "checkpoints"), "keep_rounds": 1},
    )
    for name, text in describe_machine().items():
        print(f"- {name}: {text}")
    print(
        f"\nA model of {job.model_mib:.0f} MiB in {job.tensors} tensors, {job.clients} clients, {job.rounds} rounds; "
        f"limited: {options.limited}\n",
        flush=True,
    )
    try:
        result, about = run_limited(options.limited, job, limit * MIB, directory)
        show(result)
        print(f"\nGroup: {about}")
        rounds = ", ".join(f"{seconds:.0f} s" for seconds in result.round_seconds)
        print(f"Rounds: {rounds}; the whole job {result.seconds:.0f} s; scratch {result.scratch_peak / MIB:.0f} MiB")
        if not result.ok:
            print(f"The job failed:\n{result.output[-4000:]}\n{result.server_log[-4000:]}", file=sys.stderr)
            return 1
        path = directory / "checkpoints" / "FL_global_model.safetensors"
        print(f"Largest relative error of {_CHECKED_TENSORS} tensors of the final model: {check(job, path):.1e}")
        return 0
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
