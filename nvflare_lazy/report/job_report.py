# SPDX-License-Identifier: Apache-2.0
"""`JobReport`: the numbers of a report, computed from the records of all sites of a job.

The page, the picture and the JSON document show the same object. Charts use the seconds that the job ran, which exclude
the time between a crash and the start that resumes the job.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from nvflare_lazy.errors import RecordsError
from nvflare_lazy.records import ContributionRecord, EndRecord, RoundRecord
from nvflare_lazy.report.record_files import RecordFile

_SERVER = "server"
_JOB_PROCESS = "job"
_MAX_METRIC = 1e100


@dataclass(frozen=True)
class Point:
    """A measured number of bytes.

    Attributes:
        seconds: When it was measured, in seconds that the job ran.
        time: The same in seconds since 1970.
        round: The round at that time, or None between rounds.
    """

    seconds: float
    time: float
    nbytes: int
    round: int | None


@dataclass(frozen=True)
class Start:
    """A start of the job, the first one or one that resumes it.

    Attributes:
        seconds: The seconds that the job had run before.
        down_seconds: The time without a running job before it.
    """

    seconds: float
    time: float
    down_seconds: float


@dataclass(frozen=True)
class Process:
    """The job process of a site, or an external trainer.

    Attributes:
        status: "finished", "aborted" or "failed"; None without a record of its end.
        damaged: Lines of the record file that could not be read.
    """

    name: str
    role: str
    file: str
    status: str | None
    reason: str | None
    damaged: int
    memory: tuple[Point, ...]
    scratch: tuple[Point, ...]
    memory_peak: Point | None
    scratch_peak: Point | None
    scratch_free_bytes: int | None
    settings: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True)
class Round:
    """A round, as the site that aggregated it has recorded it.

    Attributes:
        end: When it ended, in seconds that the job ran.
        time: The same in seconds since 1970.
        waiting_seconds: Time until the last result was received.
        other_seconds: The remaining time: start of the clients, sending, saving.
        model: The path of the checkpoint.
    """

    number: int | None
    site: str
    end: float
    time: float
    seconds: float
    waiting_seconds: float
    aggregation_seconds: float
    other_seconds: float
    received_bytes: int
    transport: dict[str, int]
    aggregated: int
    skipped: int
    memory_bytes: int
    scratch_bytes: int
    model: str | None


@dataclass(frozen=True)
class Traffic:
    """What a client transferred in one direction."""

    nbytes: int
    seconds: float
    ways: dict[str, int]


@dataclass(frozen=True)
class Client:
    """The results of a client.

    Attributes:
        used: Number of results that were aggregated.
        skipped: Number of rounds in which it was skipped.
        seconds: Time from the task to the result, by round; if the rounds have no numbers, in their order.
        median_seconds: The median of them; None if no time is known.
        transfer_seconds: Median time in which a result was received; None if it is unknown.
        last_in: Number of rounds in which its result was the last one.
        delay_seconds: Time that all rounds would have been shorter without its results.
        result_bytes: Size of its largest result.
        results_bytes: Size of all its results.
        received: What it received from other sites, by its own records.
        sent: What it sent, by its own records.
    """

    name: str
    used: int
    skipped: int
    seconds: dict[int, float]
    median_seconds: float | None
    transfer_seconds: float | None
    last_in: int
    delay_seconds: float
    result_bytes: int
    results_bytes: int
    received: Traffic | None
    sent: Traffic | None

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes that it received and sent; without its records, bytes that the server received."""
        nbytes = {"received": self.received.nbytes if self.received else 0, "sent": self.results_bytes}
        if self.sent:
            nbytes["sent"] = self.sent.nbytes
        return {direction: number for direction, number in nbytes.items() if number}


@dataclass(frozen=True)
class Skip:
    """The rounds in which a client was skipped for one reason."""

    client: str
    reason: str
    rounds: tuple[int | None, ...]


@dataclass(frozen=True)
class Model:
    """The last checkpoint of the job.

    Attributes:
        path: Where it is, or was when it was saved.
        nbytes: Its size; None if it is not at this path on this machine.
    """

    path: str
    site: str
    round: int | None
    nbytes: int | None


@dataclass(frozen=True)
class JobReport:
    """All numbers of a report.

    Attributes:
        made: When the report was made, in seconds since 1970; `started` and `last` likewise.
        status: "finished", "aborted" or "failed"; None if the job runs or was killed.
        last: The time of the last record.
        running_seconds: The time that the job ran until then.
        starts: All starts, the first one included.
        metrics: Values by round, by client or "average", by metric.
    """

    job: str
    made: float
    status: str | None
    reason: str | None
    started: float
    last: float
    running_seconds: float
    starts: tuple[Start, ...]
    processes: tuple[Process, ...]
    rounds: tuple[Round, ...]
    clients: tuple[Client, ...]
    skips: tuple[Skip, ...]
    metrics: dict[str, dict[str, dict[int, float]]]
    model: Model | None


def summarize(files: Sequence[RecordFile], made: float | None = None) -> JobReport:
    """Compute the report of a job.

    Args:
        files: The records of its sites, as `read_job` returns them.
        made: When the report is made. Default: now.

    Raises:
        RecordsError: If the files have no record.
    """
    known = [file for file in files if any(True for _ in _times(file))]
    if not known:
        raise RecordsError(f"no line of {files[0].place} is a record; if the job has just started, try again later")
    leading = [file for file in known if _role(file) == _SERVER] or known
    clock = _Clock(leading[0])
    results = _Results(files)
    rounds = tuple(
        sorted((_round(file, each, clock) for file in files for each in file.records.rounds), key=lambda each: each.end)
    )
    last = max(moment for file in known for moment in _times(file))
    end = leading[0].records.end
    return JobReport(
        job=files[0].job,
        made=round(time.time() if made is None else made, 3),
        status=end.status if end else None,
        reason=end.reason if end else None,
        started=clock.starts[0].time,
        last=last,
        running_seconds=clock.seconds(last),
        starts=clock.starts,
        processes=tuple(
            each
            for file in sorted(files, key=lambda each: (each not in leading, each.site))
            for each in _processes(file, clock, rounds)
        ),
        rounds=rounds,
        clients=results.clients(files),
        skips=results.skips(),
        metrics=results.metrics,
        model=_model(files),
    )


class _Clock:
    """Converts times to seconds that the job ran, by the starts and the last records of one site."""

    def __init__(self, file: RecordFile) -> None:
        times = sorted(_times(file))
        begins = sorted({start.time for start in file.records.starts}) or times[:1]
        self.starts: tuple[Start, ...] = (Start(0.0, begins[0], 0.0),)
        self._ends: list[float] = []
        for before, begin in pairwise(begins):
            stopped = max((each for each in times if before <= each < begin), default=before)
            seconds = self.starts[-1].seconds + stopped - before
            self._ends.append(stopped)
            self.starts += (Start(round(seconds, 3), begin, round(begin - stopped, 3)),)
        self._ends.append(float("inf"))

    def seconds(self, moment: float) -> float:
        run = max(0, bisect_right([start.time for start in self.starts], moment) - 1)
        start = self.starts[run]
        return round(start.seconds + max(0.0, min(moment, self._ends[run]) - start.time), 3)


def _role(file: RecordFile) -> str:
    job = file.records.job
    return job.role if job else file.site if file.site == _SERVER else "client"


def _times(file: RecordFile) -> Iterable[float]:
    records = file.records
    for kind in (records.starts, records.rounds, records.contributions, records.samples, records.transfers):
        yield from (each.time for each in kind)
    yield from (each.time for each in records.tasks)
    if records.end:
        yield records.end.time


def _round(file: RecordFile, record: RoundRecord, clock: _Clock) -> Round:
    known = [each.seconds for each in record.clients.values() if each.seconds is not None]
    waiting = min(max(known, default=0.0), record.seconds)
    aggregation = min(record.aggregation_seconds or 0.0, record.seconds - waiting)
    return Round(
        number=record.round,
        site=file.site,
        end=clock.seconds(record.time),
        time=record.time,
        seconds=record.seconds,
        waiting_seconds=round(waiting, 3),
        aggregation_seconds=round(aggregation, 3),
        other_seconds=round(record.seconds - waiting - aggregation, 3),
        received_bytes=record.received_bytes,
        transport=record.transport,
        aggregated=record.counts.get("aggregated", len(record.aggregated)),
        skipped=record.counts.get("skipped", len(record.skipped)),
        memory_bytes=record.memory_bytes,
        scratch_bytes=record.scratch_bytes,
        model=record.model,
    )


def _processes(file: RecordFile, clock: _Clock, rounds: Sequence[Round]) -> Iterable[Process]:
    records = file.records
    job, end = records.job, records.end

    def point(moment: float, nbytes: int) -> Point:
        number = next((each.number for each in rounds if each.time - each.seconds <= moment <= each.time), None)
        return Point(clock.seconds(moment), moment, nbytes, number)

    for name in dict.fromkeys([_JOB_PROCESS, *(sample.process for sample in records.samples)]):
        is_job = name == _JOB_PROCESS
        samples = [sample for sample in records.samples if sample.process == name]
        memory = [point(each.time, each.memory_bytes) for each in samples]
        scratch = [point(each.time, each.scratch_bytes) for each in samples]
        if is_job:
            memory += [point(each.time, each.memory_bytes) for each in records.starts]
            memory += [point(each.time, each.memory_bytes) for each in records.rounds]
            scratch += [point(each.time, each.scratch_bytes) for each in records.rounds]
        peaks = records.rounds if is_job else ()
        yield Process(
            name=file.site if is_job else f"{file.site} {name}",
            role=_role(file) if is_job else name,
            file=file.place,
            status=end.status if end else None,
            reason=end.reason if end else None,
            damaged=records.damaged,
            memory=tuple(sorted(memory, key=lambda each: each.time)),
            scratch=tuple(sorted(scratch, key=lambda each: each.time)),
            memory_peak=_highest([*memory, *(point(each.time, each.memory_peak_bytes) for each in peaks)]),
            scratch_peak=_highest([*scratch, *(point(each.time, each.scratch_peak_bytes) for each in peaks)]),
            scratch_free_bytes=job.scratch_free_bytes if job and is_job else None,
            settings=job.settings if job else {},
            versions=job.versions if job else {},
        )


def _highest(points: Iterable[Point]) -> Point | None:
    # Of equal ones the first: a round has the peak of its samples again.
    return max(points, key=lambda each: (each.nbytes, -each.time), default=None)


class _Results:
    """The results of all clients, in the rounds of all sites that aggregate."""

    def __init__(self, files: Sequence[RecordFile]) -> None:
        self._used: dict[str, int] = defaultdict(int)
        self._skips: dict[tuple[str, str], list[int | None]] = {}
        self._results: dict[str, list[ContributionRecord]] = defaultdict(list)
        self._last: dict[str, list[float]] = defaultdict(list)
        self.metrics: dict[str, dict[str, dict[int, float]]] = {}
        for file in files:
            for record in file.records.rounds:
                self._add(record)
            for result in file.records.contributions:
                self._add_result(result)

    def _add(self, record: RoundRecord) -> None:
        for client in record.aggregated:
            self._used[client] += 1
        for client, reason in record.skipped.items():
            self._skips.setdefault((client, reason), []).append(record.round)
        self._add_metrics("average", record.round, record.metrics)
        for result in record.clients.values():
            result.round = record.round
            self._add_result(result)
        known = sorted((each.seconds, name) for name, each in record.clients.items() if each.seconds is not None)
        if len(known) > 1:
            (second, _), (first, slowest) = known[-2:]
            self._last[slowest].append(first - second)

    def _add_result(self, result: ContributionRecord) -> None:
        self._results[result.client].append(result)
        self._add_metrics(result.client, result.round, result.metrics)

    def _add_metrics(self, of: str, number: int | None, values: dict[str, float]) -> None:
        for name, value in values.items():
            # A client may send any number, and charts compute with it.
            if number is not None and abs(value) < _MAX_METRIC:
                self.metrics.setdefault(name, {}).setdefault(of, {})[number] = value

    def skips(self) -> tuple[Skip, ...]:
        return tuple(Skip(client, reason, tuple(rounds)) for (client, reason), rounds in self._skips.items())

    def clients(self, files: Sequence[RecordFile]) -> tuple[Client, ...]:
        own = {file.site: file for file in files if _role(file) != _SERVER}
        names = dict.fromkeys([*self._used, *self._results, *(name for name, _ in self._skips), *own])
        return tuple(self._client(name, own.get(name)) for name in sorted(names))

    def _client(self, name: str, own: RecordFile | None) -> Client:
        results = self._results.get(name, [])
        seconds = {
            place if each.round is None else each.round: each.seconds
            for place, each in enumerate(results)
            if each.seconds is not None
        }
        transfers = [each.transfer_seconds for each in results if each.transfer_seconds is not None]
        return Client(
            name=name,
            used=self._used.get(name, 0),
            skipped=sum(len(rounds) for (client, _), rounds in self._skips.items() if client == name),
            seconds=seconds,
            median_seconds=round(median(seconds.values()), 3) if seconds else None,
            transfer_seconds=round(median(transfers), 3) if transfers else None,
            last_in=len(self._last.get(name, ())),
            delay_seconds=round(sum(self._last.get(name, ())), 3),
            result_bytes=max((each.nbytes for each in results), default=0),
            results_bytes=sum(each.nbytes for each in results),
            received=_traffic(own, "received"),
            sent=_traffic(own, "sent"),
        )


def _traffic(own: RecordFile | None, direction: str) -> Traffic | None:
    # Not those between a client job and its own external trainer.
    if own is None:
        return None
    found = [each for each in own.records.transfers if each.direction == direction]
    transfers = [each for each in found if each.peer.split(".")[0] != own.site]
    if not transfers:
        return None
    ways: dict[str, int] = defaultdict(int)
    for each in transfers:
        ways[each.way] += each.nbytes
    return Traffic(sum(ways.values()), round(sum(each.seconds for each in transfers), 3), dict(ways))


def _model(files: Sequence[RecordFile]) -> Model | None:
    saved: list[tuple[RoundRecord | EndRecord, RecordFile]]
    saved = [(each, file) for file in files for each in file.records.rounds if each.model]
    if not saved:
        # In swarm learning, clients save the model after the last round.
        ends = [(file.records.end, file) for file in files]
        saved = [(end, file) for end, file in ends if end and end.model]
    if not saved:
        return None
    record, file = max(saved, key=lambda each: each[0].time)
    recorded = Path(record.model or "")
    number = record.round if isinstance(record, RoundRecord) else None
    # A download or a moved workspace has it elsewhere.
    folders = [] if file.run_dir is None else [file.run_dir, *file.run_dir.glob("app_*")]
    for path in (recorded, *(folder / recorded.name for folder in folders)):
        try:
            return Model(str(path), file.site, number, _size(path))
        except OSError:
            continue  # not here, or not a path
    return Model(str(recorded), file.site, number, None)


def _size(path: Path) -> int:
    # Not below it: the path may come from another machine, and be any directory here.
    return sum(each.stat().st_size for each in path.iterdir()) if path.is_dir() else path.stat().st_size
