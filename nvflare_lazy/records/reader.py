# SPDX-License-Identifier: Apache-2.0
"""`read_records()`: the records of one site, of a job that runs, has ended or was killed.

A file may be from another machine: lines are checked one by one, and unreadable ones are counted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from nvflare_lazy.errors import RecordsError
from nvflare_lazy.records.schema import (
    SCHEMA,
    ContributionRecord,
    EndRecord,
    JobRecord,
    Record,
    RoundRecord,
    SampleRecord,
    TaskRecord,
    TransferRecord,
    from_plain,
)

#: The longest file and the longest line that are read; the writer's are far shorter.
MAX_FILE_BYTES = 64 << 20
_MAX_LINE_BYTES = 4 << 20

_Numbered = TypeVar("_Numbered", RoundRecord, ContributionRecord, TransferRecord, TaskRecord)


@dataclass
class Records:
    """The records of one site, in the order of time.

    Attributes:
        path: The file.
        starts: One record for each start of the job; the last one describes the running or last run. A simulator with
            fewer threads than clients runs each task of a client in a new process, which is no start of the job.
        rounds: The rounds that ended. A round that a resumed job has repeated is the repeated one.
        contributions: The results of the round that has not ended.
        samples: Memory and scratch over time.
        transfers: Payloads that the processes of a client have transferred.
        tasks: The tasks of a client.
        end: How the last run ended; None if it still runs or was killed.
        damaged: The number of lines that could not be read.
    """

    path: Path
    starts: list[JobRecord] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    contributions: list[ContributionRecord] = field(default_factory=list)
    samples: list[SampleRecord] = field(default_factory=list)
    transfers: list[TransferRecord] = field(default_factory=list)
    tasks: list[TaskRecord] = field(default_factory=list)
    end: EndRecord | None = None
    damaged: int = 0

    @property
    def job(self) -> JobRecord | None:
        """The last start of the job, or None if its line is damaged."""
        return self.starts[-1] if self.starts else None


def read_records(path: str | os.PathLike[str]) -> Records:
    """Return the records of a file.

    Raises:
        RecordsError: If the file cannot be read, or a newer version of nvflare-lazy wrote it.

    Example:
        >>> records = read_records("workspace/server/simulate_job/nvflare_lazy.jsonl")
        >>> [(round.round, round.seconds) for round in records.rounds]
    """
    found = Path(path)
    try:
        with open(found, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RecordsError(f"cannot read the records {found}: {error.strerror or error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise RecordsError(f"the records {found} are longer than {MAX_FILE_BYTES >> 20} MiB; nvflare-lazy writes less")
    return parse_records(content.splitlines(), found)


def parse_records(lines: Iterable[bytes], path: Path) -> Records:
    """Return the records of lines, for example from a file in an archive; see `read_records`.

    Args:
        lines: The lines.
        path: The name of the file, for messages.
    """
    reading = _Reading(Records(path))
    for line in lines:
        if not line.strip():
            continue
        try:
            if len(line) > _MAX_LINE_BYTES:
                raise ValueError("the line is too long")
            content = json.loads(line)
            if isinstance(content, dict) and content.get("kind") == "job":
                _check_version(content.get("schema"), path)
            record = from_plain(content)
        except (ValueError, RecursionError):
            reading.records.damaged += 1
            continue
        if record is not None:
            reading.add(record)
    return reading.finish()


def _check_version(schema: object, path: Path) -> None:
    if isinstance(schema, int) and schema > SCHEMA:
        raise RecordsError(
            f"the records {path} have version {schema}, and this version of nvflare-lazy reads {SCHEMA}; "
            "upgrade nvflare-lazy to read them"
        )


class _Reading:
    """Collects the records of a file, in its order."""

    def __init__(self, records: Records) -> None:
        self.records = records
        # Whether a round of this run has a number already: the first one tells which earlier rounds it repeats.
        self._has_numbered_round = True

    def add(self, record: Record) -> None:
        records = self.records
        if isinstance(record, JobRecord) and self._is_next_process(record):
            records.end = None
        elif isinstance(record, JobRecord):
            records.starts.append(record)
            records.contributions.clear()
            records.end, self._has_numbered_round = None, False
        elif isinstance(record, EndRecord):
            records.end = record
        elif isinstance(record, SampleRecord):
            records.samples.append(record)
        elif isinstance(record, TransferRecord):
            records.transfers.append(record)
        elif isinstance(record, (RoundRecord, ContributionRecord, TaskRecord)):
            self._replace_from(record.round)
            if isinstance(record, RoundRecord):
                records.contributions.clear()
                records.rounds.append(record)
            elif isinstance(record, ContributionRecord):
                records.contributions.append(record)
            else:
                records.tasks.append(record)

    def _is_next_process(self, record: JobRecord) -> bool:
        """Whether a client continues the run in another process: the one before ended, and not the job."""
        last, end = self.records.job, self.records.end
        return (
            last is not None
            and end is not None
            and (end.status, record.role) == ("finished", "client")
            and (last.job, last.role) == (record.job, record.role)
        )

    def _replace_from(self, number: int | None) -> None:
        """Drop the rounds of earlier runs that the first round of this run and those after it repeat."""
        if self._has_numbered_round or number is None:
            return
        self._has_numbered_round = True
        records, started = self.records, self.records.starts[-1].time
        records.rounds = _before(records.rounds, number)
        records.tasks = _before(records.tasks, number)
        earlier = [each for each in records.transfers if each.time < started]
        records.transfers = _before(earlier, number) + [each for each in records.transfers if each.time >= started]

    def finish(self) -> Records:
        """Return the records, with the rounds of the transfers."""
        records = self.records
        records.samples.sort(key=lambda sample: sample.time)
        records.transfers.sort(key=lambda transfer: transfer.time)
        # Payloads of other clients, in swarm learning, can be about the previous, this or the next round.
        known = {"server", *(start.site for start in records.starts)}
        for transfer in records.transfers:
            if transfer.round is None and transfer.process == "trainer" and known & set(transfer.peer.split(".")):
                transfer.round = _round_at(transfer.time - transfer.seconds, records.tasks)
        return records


def _before(records: list[_Numbered], number: int) -> list[_Numbered]:
    return [each for each in records if each.round is None or each.round < number]


def _round_at(time: float, tasks: list[TaskRecord]) -> int | None:
    """Return the round of the last task that began before a time."""
    return next((task.round for task in reversed(tasks) if task.time <= time), None)
