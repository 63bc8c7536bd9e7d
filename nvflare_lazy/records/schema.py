# SPDX-License-Identifier: Apache-2.0
"""The kinds of records of a job, one dataclass each, and their form as lines of JSON.

`writer` writes these lines and `reader` reads them. Text from other processes is cut and escaped in both directions.
"""

from __future__ import annotations

import json
import sys
import time
import types
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from nvflare_lazy._text import printable

#: The version of the fields. Adding a field or a kind does not change it; changing the meaning of one does.
SCHEMA = 1
#: The name of the file, in the run directory of a job.
FILE_NAME = "nvflare_lazy.jsonl"
#: The number of clients, metrics or settings that one record lists at most.
MAX_ENTRIES = 256
_MAX_TEXT = 500
_MAX_NAME = 128
_MAX_INT = 1 << 63
# The metrics that clients choose can make the line of a round longer than this. It then has no `CLIENT_FIELDS`.
_MAX_LINE_BYTES = 1 << 20
#: The fields of a round that list clients; the counts stay without them.
CLIENT_FIELDS = ("clients", "tasked", "aggregated", "skipped")

_Record = TypeVar("_Record", bound="Record")


def now() -> float:
    """Return the time of a record, in seconds since 1970."""
    return round(time.time(), 3)


@dataclass(kw_only=True)
class Record:
    """One line of the file.

    Attributes:
        time: When it was written, in seconds since 1970.
    """

    kind: ClassVar[str]
    time: float = field(default_factory=now)


@dataclass(kw_only=True)
class JobRecord(Record):
    """The start of a run of a job, in the process of one site. A job that resumes, or runs again, has several.

    Attributes:
        schema: The version of the fields, 1 in this version.
        job: The id of the job.
        site: The name of the site.
        role: "server" or "client".
        versions: Versions of nvflare-lazy, NVFlare, torch and Python.
        settings: The settings of the components of the job.
        memory_bytes: Anonymous memory of the process before the first round.
        scratch_free_bytes: Bytes that scratch can still take.
    """

    kind = "job"
    schema: int = SCHEMA
    job: str = ""
    site: str = ""
    role: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    memory_bytes: int = 0
    scratch_free_bytes: int | None = None


@dataclass(kw_only=True)
class ContributionRecord(Record):
    """The result of one client.

    Attributes:
        client: The name of the client.
        round: Its round, or None if the controller does not number rounds.
        nbytes: Bytes of its tensors.
        tensors: Number of its tensors.
        on_disk: Whether the tensors are on disk instead of in memory.
        seconds: Time from sending the task to receiving the result, or None if it is unknown.
        task_seconds: Time in which the client received the tensors of its task, or None if it is unknown.
        transfer_seconds: Time in which the tensors of the result were received, or None if it is unknown.
        way: The way of transport of the tensors of the result, or None if it is unknown.
        metrics: Metrics that the client reports with its result.
        accepted: Whether the result was accepted; None without a verdict.
        reason: Why the result is not used.
    """

    kind = "contribution"
    client: str
    round: int | None = None
    nbytes: int = 0
    tensors: int = 0
    on_disk: bool = False
    seconds: float | None = None
    task_seconds: float | None = None
    transfer_seconds: float | None = None
    way: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    accepted: bool | None = None
    reason: str | None = None


@dataclass(kw_only=True)
class RoundRecord(Record):
    """One round, written at its end. Lists have at most 256 clients; the counts include all clients.

    Attributes:
        round: Its number, or None if the controller does not number rounds.
        tasked: Clients that received the task.
        aggregated: Clients whose results were aggregated.
        skipped: The other clients, each with the reason.
        counts: The number of all clients that are "tasked", "aggregated" and "skipped".
        clients: The result of each client.
        received_bytes: Bytes of all results.
        transport: Bytes of all tensors that this process received in the round, by the way of transport.
        seconds: Duration of the round.
        aggregation_seconds: Duration of the aggregation, if `LazyAggregator` did it.
        memory_bytes: Anonymous memory of the process at the end of the round.
        memory_peak_bytes: The most anonymous memory that a sample of the round has.
        scratch_bytes: Scratch in use at the end of the round.
        scratch_peak_bytes: The most scratch in use in the round.
        metrics: The metrics of the clients, averaged by the aggregator, if `LazyAggregator` did it.
        model: The path of the checkpoint of the round, if `LazyModelPersistor` wrote one.
    """

    kind = "round"
    round: int | None = None
    tasked: list[str] = field(default_factory=list)
    aggregated: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    clients: dict[str, ContributionRecord] = field(default_factory=dict)
    received_bytes: int = 0
    transport: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    aggregation_seconds: float | None = None
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    scratch_bytes: int = 0
    scratch_peak_bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    model: str | None = None

    def numbers(self) -> dict[str, float]:
        """Return the numbers of the round that are sent as metrics."""
        numbers = {
            "received_bytes": self.received_bytes,
            "seconds": self.seconds,
            "aggregation_seconds": self.aggregation_seconds,
            "memory_bytes": self.memory_bytes,
            "scratch_bytes": self.scratch_bytes,
            "aggregated": self.counts.get("aggregated", len(self.aggregated)),
            "skipped": self.counts.get("skipped", len(self.skipped)),
        }
        return {name: float(value) for name, value in numbers.items() if value is not None}


@dataclass(kw_only=True)
class SampleRecord(Record):
    """Memory and scratch of a process: the most since the previous sample. The time is when the most memory was used.

    Attributes:
        memory_bytes: Anonymous memory of the process.
        scratch_bytes: Scratch in use.
        process: "job", or "trainer" for a trainer in its own process.
    """

    kind = "sample"
    memory_bytes: int = 0
    scratch_bytes: int = 0
    process: str = "job"


@dataclass(kw_only=True)
class TransferRecord(Record):
    """A payload that a client's process received or sent.

    Attributes:
        direction: "received" or "sent".
        peer: The cell at the other end, as NVFlare names it.
        nbytes: Bytes of its tensors.
        seconds: Time in which they were transferred.
        way: The way of transport.
        round: The round, or None if it is unknown, as with another client in swarm learning. The reader finds it by the
            time if a trainer in its own process has transferred the payload.
        process: "job", or "trainer" for a trainer in its own process.
    """

    kind = "transfer"
    direction: str
    peer: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    way: str = ""
    round: int | None = None
    process: str = "job"


@dataclass(kw_only=True)
class TaskRecord(Record):
    """A task that a client begins.

    Attributes:
        task: The name of the task.
        round: Its round, or None if the controller does not number rounds.
    """

    kind = "task"
    task: str
    round: int | None = None


@dataclass(kw_only=True)
class EndRecord(Record):
    """The end of a run. It is missing if the job still runs, or if the process was killed.

    Attributes:
        status: "finished", "aborted" or "failed".
        reason: Why the job failed, if a component has reported it.
        model: The path of the last checkpoint that this process has saved.
    """

    kind = "end"
    status: str = "finished"
    reason: str | None = None
    model: str | None = None


KINDS: dict[str, type[Record]] = {
    kind.kind: kind
    for kind in (JobRecord, ContributionRecord, RoundRecord, SampleRecord, TransferRecord, TaskRecord, EndRecord)
}
_HINTS = {kind: get_type_hints(kind) for kind in KINDS.values()}


def to_line(record: Record) -> bytes:
    """Return the line of a record."""
    content = to_plain(record)
    line = _encoded(content)
    if len(line) > _MAX_LINE_BYTES:
        line = _encoded({name: part for name, part in content.items() if name not in CLIENT_FIELDS})
    return line


def to_plain(record: Record) -> dict[str, Any]:
    """Return a record as plain values, `kind` and `time` first."""
    return {"kind": record.kind, **{part.name: _plain(getattr(record, part.name)) for part in fields(record)}}


def from_plain(content: object) -> Record | None:
    """Return the record of the plain values of a line, or None if its kind is unknown. Unknown fields are ignored.

    Raises:
        ValueError: If it is not a record, or a field has another type than expected.
    """
    if not isinstance(content, dict) or not isinstance(content.get("kind"), str):
        raise ValueError("a record must be an object with a kind")
    kind = KINDS.get(content["kind"])
    return None if kind is None else _record(kind, content)


def _encoded(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=True, allow_nan=False).encode() + b"\n"


def cut(text: str, length: int = _MAX_TEXT) -> str:
    """Return untrusted text printable, and cut if it is long."""
    escaped = printable(text[: length + 1])
    return escaped if len(escaped) <= length else f"{escaped[: length - 3]}..."


def _record(kind: type[_Record], content: dict[str, Any]) -> _Record:
    names = {part.name for part in fields(kind)}
    found = {name: _typed(value, _HINTS[kind][name]) for name, value in content.items() if name in names}
    try:
        return kind(**found)
    except TypeError as error:
        raise ValueError(f"invalid record: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return cut(value)
    if isinstance(value, Record):
        # The record that contains it has the same round, and the client is its key.
        return {
            name: part
            for name, part in to_plain(value).items()
            if name not in ("kind", "time", "client", "round") and part not in (None, {})
        }
    if isinstance(value, dict):
        return {cut(str(name), _MAX_NAME): _plain(part) for name, part in list(value.items())[:MAX_ENTRIES]}
    if isinstance(value, (list, tuple)):
        return [cut(part, _MAX_NAME) for part in value[:MAX_ENTRIES]]
    if isinstance(value, float):
        return round(value, 6) if isfinite(value) and abs(value) < 1e15 else value if isfinite(value) else None
    return value


def _typed(value: Any, hint: Any) -> Any:
    """Return a value of JSON as the type of a field, with its text cut and printable."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        for option in get_args(hint):
            try:
                return _typed(value, option)
            except ValueError:
                continue
    elif origin is list and isinstance(value, list):
        return [cut(_typed(part, get_args(hint)[0]), _MAX_NAME) for part in value[:MAX_ENTRIES]]
    elif origin is dict and isinstance(value, dict):
        of = get_args(hint)[1]
        return {
            cut(name, _MAX_NAME): _typed({**part, "client": name} if of is ContributionRecord else part, of)
            for name, part in list(value.items())[:MAX_ENTRIES]
            if of is not ContributionRecord or isinstance(part, dict)
        }
    elif hint is ContributionRecord and isinstance(value, dict):
        return _record(ContributionRecord, value)
    elif hint is type(None) and value is None:
        return None
    elif hint is str and isinstance(value, str):
        return cut(value)
    elif hint is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    elif hint in (int, bool) and type(value) is hint and abs(value) < _MAX_INT:
        return value
    raise ValueError(f"expected {hint}, got {type(value).__name__}")
