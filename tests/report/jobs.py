# SPDX-License-Identifier: Apache-2.0
"""Record files of jobs that did not run: as the package writes them, with chosen numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nvflare_lazy.records import (
    FILE_NAME,
    ContributionRecord,
    EndRecord,
    JobRecord,
    Record,
    RoundRecord,
    SampleRecord,
    TaskRecord,
    TransferRecord,
)
from nvflare_lazy.records.schema import to_line

MIB = 1 << 20
#: Start of the jobs: 2026-01-02 03:04:05 UTC.
BEGIN = 1767323045.0


def write(path: Path, records: Sequence[Record]) -> Path:
    """Write records to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(to_line, records)))
    return path


def server_records(
    job: str = "simulate_job",
    *,
    begin: float = BEGIN,
    rounds: Sequence[int] = (0, 1, 2),
    clients: Sequence[str] = ("site-1", "site-2", "site-3"),
    slow: str = "site-2",
    skipped: dict[int, dict[str, str]] | None = None,
    ended: bool = True,
    model: str | None = "/data/FL_global_model.safetensors",
) -> list[Record]:
    """Return the records of a server. Rounds take 10 s, and the slow client 6 s longer than the 2 s of the others."""
    versions = {"nvflare-lazy": "0.1.0", "nvflare": "2.9.0"}
    settings = {"level": 3, "scratch_dir": "/scratch", "rule": "mean"}
    records: list[Record] = [
        JobRecord(
            time=begin, job=job, site="server", role="server", versions=versions, settings=settings,
            memory_bytes=150 * MIB, scratch_free_bytes=50_000 * MIB,
        )
    ]  # fmt: skip
    for place, number in enumerate(rounds):
        start = begin + 10 * place
        for second in range(0, 10, 2):
            memory = 150 + 10 * second + 5 * number
            scratch = 100 * min(len(clients), second // 2) + number
            records.append(SampleRecord(time=start + second, memory_bytes=memory * MIB, scratch_bytes=scratch * MIB))
        left_out = (skipped or {}).get(number, {})
        results = {
            client: ContributionRecord(
                time=start + 8, client=client, nbytes=100 * MIB, tensors=4, on_disk=True,
                seconds=8.0 if client == slow else 2.0, transfer_seconds=0.5, way="in segments",
                metrics={"accuracy": 0.5 + 0.1 * number}, accepted=client not in left_out, reason=left_out.get(client),
            )
            for client in clients
        }  # fmt: skip
        records += results.values()
        used = [client for client in clients if client not in left_out]
        records.append(
            RoundRecord(
                time=start + 10, round=number, tasked=list(clients), aggregated=used, skipped=left_out,
                counts={"tasked": len(clients), "aggregated": len(used), "skipped": len(left_out)}, clients=results,
                received_bytes=100 * MIB * len(clients), transport={"in segments": 100 * MIB * len(clients)},
                seconds=10.0, aggregation_seconds=1.5,
                memory_bytes=160 * MIB, memory_peak_bytes=(230 + 5 * number) * MIB,
                scratch_bytes=0, scratch_peak_bytes=100 * MIB * len(clients) + number * MIB,
                metrics={"accuracy": 0.5 + 0.1 * number}, model=model,
            )
        )  # fmt: skip
    if ended:
        records.append(EndRecord(time=begin + 10 * len(rounds) + 1))
    return records


def client_records(site: str, job: str = "simulate_job", *, rounds: Sequence[int] = (0, 1, 2)) -> list[Record]:
    """Return the records of a client, with an external trainer."""
    records: list[Record] = [JobRecord(time=BEGIN, job=job, site=site, role="client", memory_bytes=120 * MIB)]
    for place, number in enumerate(rounds):
        start = BEGIN + 10 * place
        records += [
            TaskRecord(time=start, task="train", round=number),
            TransferRecord(time=start + 1, direction="received", nbytes=100 * MIB, seconds=0.5, way="in segments"),
            SampleRecord(time=start + 1, memory_bytes=140 * MIB, scratch_bytes=100 * MIB),
            SampleRecord(time=start + 2, memory_bytes=300 * MIB, scratch_bytes=100 * MIB, process="trainer"),
            TransferRecord(time=start + 2, direction="sent", nbytes=100 * MIB, seconds=0.25, way="in segments"),
        ]
    return [*records, EndRecord(time=BEGIN + 10 * len(rounds) + 1)]


def simulated(workspace: Path, clients: Sequence[str] = ("site-1", "site-2", "site-3"), **more: object) -> Path:
    """Write the records of a job as the simulator does, and return its workspace."""
    write(workspace / "server" / "simulate_job" / FILE_NAME, server_records(clients=clients, **more))
    for client in clients:
        write(workspace / client / "simulate_job" / FILE_NAME, client_records(client))
    return workspace
