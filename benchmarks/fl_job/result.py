# SPDX-License-Identifier: Apache-2.0
"""What a measured run of a job came to."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.fl_job.job import FLJob
from benchmarks.fl_job.sampling import MachineSample, Sample

MIB = 1 << 20
_ROUND = re.compile(r"Round \d+ started")
_END = re.compile(r"Finished (FedAvg|ScatterAndGather|Scaffold)")


@dataclass(frozen=True)
class RunResult:
    """Samples, times and files of one run."""

    job: FLJob
    started: float
    seconds: float
    status: int
    samples: list[Sample]
    machine_samples: list[MachineSample]
    server_log: str
    records: list[dict[str, str]]
    server_run_dir: Path
    workspace: Path
    output: str = ""

    @property
    def ok(self) -> bool:
        """Whether the run ended well."""
        return self.status == 0

    def peak(self, role: str) -> int:
        """Return the most anonymous memory one process of a role had, in bytes; roles are prefixes."""
        return max((sample.anon for sample in self.samples if sample.role.startswith(role)), default=0)

    @property
    def server_peak(self) -> int:
        """Most anonymous memory the server's job process had."""
        return self.peak("server")

    @property
    def peaks(self) -> dict[str, int]:
        """Most anonymous memory of one process of each role."""
        names = self._role_names()
        peaks: dict[str, int] = defaultdict(int)
        for sample in self.samples:
            peaks[names[sample.pid]] = max(peaks[names[sample.pid]], sample.anon)
        return dict(peaks)

    @property
    def server_timeline(self) -> list[tuple[float, int]]:
        """Seconds and anonymous memory of the server's job process, without the processes that only started it."""
        servers = [sample for sample in self.samples if sample.role == "server"]
        job = max(servers, key=lambda sample: sample.anon, default=None)
        return [(sample.seconds, sample.anon) for sample in servers if job is not None and sample.pid == job.pid]

    @property
    def client_peak(self) -> int:
        """Most anonymous memory any client's job process had."""
        return self.peak("client")

    @property
    def cpu_by_role(self) -> dict[str, float]:
        """CPU seconds of all processes of each role while the job was watched.

        A process that ends before it is noticed is missing, and the last moment of any other.
        """
        names = self._role_names()
        first = min((sample.seconds for sample in self.samples), default=0.0)
        before = {sample.pid: sample.cpu for sample in self.samples if sample.seconds == first}
        seconds: dict[str, float] = defaultdict(float)
        for pid, cpu in {sample.pid: sample.cpu for sample in self.samples}.items():
            seconds[names[pid]] += cpu - before.get(pid, 0.0)
        return dict(seconds)

    @property
    def cpu_seconds(self) -> float:
        """Sum of `cpu_by_role`."""
        return sum(self.cpu_by_role.values())

    def _role_names(self) -> dict[int, str]:
        """Return the role of each process without its site; a process that was just forked still looks like another."""
        return {sample.pid: sample.role.partition("-")[0] for sample in self.samples}

    @property
    def written_per_round(self) -> float:
        """Bytes given to write calls in a round, mean of all rounds; the first model is written before them.

        Parents would count their children a second time, and none of the others has a child that ends in a round.
        """
        start, end = self._extent([sample.seconds for sample in self.samples])
        names = self._role_names()
        before: dict[int, int] = defaultdict(int)
        after: dict[int, int] = defaultdict(int)
        for sample in self.samples:
            if names[sample.pid] in ("server", "client", "trainer"):
                if sample.seconds <= start:
                    before[sample.pid] = sample.written
                if sample.seconds <= end:
                    after[sample.pid] = sample.written
        return (sum(after.values()) - sum(before.values())) / len(self.round_seconds)

    @property
    def sockets_per_round(self) -> float:
        """Bytes that loopback carried in a round, mean of all rounds."""
        start, end = self._extent([sample.seconds for sample in self.machine_samples])
        carried = [sample.sockets for sample in self.machine_samples if start <= sample.seconds <= end]
        return (carried[-1] - carried[0]) / len(self.round_seconds)

    def _extent(self, sampled: list[float]) -> tuple[float, float]:
        """Return the first moments with samples after the first round has started, and after the last one has ended.

        Before, the process that instantiated the model has ended, whose bytes its parent then counts.
        """
        times = self._boundaries()
        start, end = times[0] - self.started, times[-1] - self.started
        return min(t for t in sampled if t >= start), min((t for t in sampled if t >= end), default=end)

    @property
    def scratch_peak(self) -> int:
        """Most bytes the scratch had on disk."""
        return max((sample.scratch for sample in self.machine_samples), default=0)

    @property
    def page_cache_peak(self) -> int:
        """Maximum growth of the machine's page cache since the start."""
        cached = [sample.page_cache for sample in self.machine_samples]
        return max(cached) - cached[0] if cached else 0

    @property
    def round_seconds(self) -> list[float]:
        """Seconds of each round, from the server's log."""
        return [after - before for before, after in pairwise(self._boundaries())]

    def _boundaries(self) -> list[float]:
        return [
            datetime.strptime(record["asctime"], "%Y-%m-%d %H:%M:%S,%f").timestamp()
            for record in self.records
            if _ROUND.search(record["message"]) or _END.search(record["message"])
        ]

    def summary(self) -> dict[str, Any]:
        """Return the numbers that matter, ready for JSON or a table."""
        rounds = self.round_seconds
        return {
            "mode": self.job.mode,
            "clients": self.job.clients,
            "model_mib": self.job.model_mib,
            "tensors": self.job.tensors,
            "rounds": self.job.rounds,
            "status": self.status,
            "server_peak_mib": round(self.server_peak / MIB),
            "client_peak_mib": round(self.client_peak / MIB),
            "trainer_peak_mib": round(self.peak("trainer") / MIB),
            "scratch_peak_mib": round(self.scratch_peak / MIB),
            "page_cache_growth_mib": round(self.page_cache_peak / MIB),
            "round_seconds": [round(seconds, 2) for seconds in rounds],
            "seconds": round(self.seconds, 1),
            "cpu_seconds": {role: round(seconds, 1) for role, seconds in self.cpu_by_role.items()},
        }

    def to_json(self) -> str:
        """Return the summary and every sample."""
        return json.dumps(
            {
                "summary": self.summary(),
                "samples": [asdict(sample) for sample in self.samples],
                "machine": [asdict(sample) for sample in self.machine_samples],
            }
        )


def read_records(path: Path) -> list[dict[str, str]]:
    """Return the records of the JSON log, without a last line that a killed process did not finish."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records
