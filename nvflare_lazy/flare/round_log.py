# SPDX-License-Identifier: Apache-2.0
"""What happened in each round, in one line for people and as records for programs.

Whoever sees something, the offload component on NVFlare's events and the aggregator in its own work, tells it here. It
becomes an INFO line, a line of JSON in the job's run directory, and a metric for whatever receives NVFlare's analytics.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nvflare_lazy._system import anonymous_bytes
from nvflare_lazy._text import format_size

FILE_NAME = "nvflare_lazy.jsonl"


@dataclass
class ContributionRecord:
    """One client's result.

    Attributes:
        client: Who sent it.
        round: The round it is for.
        nbytes: Bytes of its tensors.
        tensors: How many there are.
        on_disk: Whether they are on disk rather than in memory.
        seconds: From the task going out to the result being there, or None if that was not seen.
        accepted: Whether it took part; None until that is known.
        reason: Why not.
    """

    client: str
    round: int | None
    nbytes: int
    tensors: int
    on_disk: bool
    seconds: float | None
    accepted: bool | None = None
    reason: str | None = None


@dataclass
class RoundRecord:
    """One round as a whole.

    Attributes:
        round: Its number.
        asked: Clients that got the task.
        took_part: Clients whose results were combined.
        left_out: The others, each with the reason.
        received_bytes: Bytes of all results.
        seconds: How long the round took.
        aggregation_seconds: How long combining took, if our aggregator did it.
        memory_bytes: Anonymous memory of the process at its end.
        scratch_bytes: Bytes of scratch in use at its end.
        scratch_peak_bytes: Most bytes of scratch in use so far.
    """

    round: int | None
    asked: list[str] = field(default_factory=list)
    took_part: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    received_bytes: int = 0
    seconds: float = 0.0
    aggregation_seconds: float | None = None
    memory_bytes: int = 0
    scratch_bytes: int = 0
    scratch_peak_bytes: int = 0

    def metrics(self) -> dict[str, float]:
        """Return the numbers among it."""
        numbers = {
            "received_bytes": self.received_bytes,
            "seconds": self.seconds,
            "aggregation_seconds": self.aggregation_seconds,
            "memory_bytes": self.memory_bytes,
            "scratch_bytes": self.scratch_bytes,
            "took_part": len(self.took_part),
            "left_out": len(self.left_out),
        }
        return {name: float(value) for name, value in numbers.items() if value is not None}


class RoundLog:
    """Collects what happens in a round and writes it down at its end.

    Args:
        path: The file of records; None to keep none.
        say: Where lines for people go.
        measure: Called with the record of a round when it ends, to send its metrics on.
    """

    def __init__(
        self,
        path: Path | None,
        say: Callable[[str], None],
        measure: Callable[[RoundRecord], None] | None = None,
    ) -> None:
        self._path = path
        self._say = say
        self._measure = measure
        self._lock = threading.RLock()
        self._record: RoundRecord | None = None
        self._started = 0.0
        self._announced = True
        self._sent: dict[str, float] = {}
        self._results: dict[str, ContributionRecord] = {}
        self._reasons: dict[str, str] = {}

    def start_round(self, number: int | None, *, announced: bool = True) -> None:
        """Begin a round.

        Args:
            number: Its number.
            announced: Whether the controller says so. One that does not may have no rounds of contributions, so then
                nothing is written down of a round without any.
        """
        with self._lock:
            self._record, self._started, self._announced = RoundRecord(number), time.monotonic(), announced
            self._sent.clear()
            self._results.clear()
            self._reasons.clear()

    def sent(self, client: str) -> None:
        """A client got the round's task."""
        with self._lock:
            self._sent[client] = time.monotonic()
            if self._record is not None and client not in self._record.asked:
                self._record.asked.append(client)

    def received(self, client: str, nbytes: int, tensors: int, *, on_disk: bool) -> None:
        """A client's result is here."""
        with self._lock:
            sent = self._sent.get(client)
            self._results[client] = ContributionRecord(
                client=client,
                round=self._record.round if self._record else None,
                nbytes=nbytes,
                tensors=tensors,
                on_disk=on_disk,
                seconds=None if sent is None else round(time.monotonic() - sent, 3),
            )

    def left_out(self, client: str, reason: str) -> None:
        """A client's result does not take part, and why; the first reason counts."""
        with self._lock:
            self._reasons.setdefault(client, reason)

    def settled(self, client: str, *, accepted: bool) -> None:
        """It is decided whether a client's result is taken into the round."""
        with self._lock:
            record = self._results.get(client) or ContributionRecord(
                client, self._record.round if self._record else None, 0, 0, False, None
            )
            self._results[client] = record
            record.accepted = accepted
            if not accepted:
                record.reason = self._reasons.setdefault(client, "the controller or its aggregator did not accept it")
            self._write("contribution", asdict(record))
        where = "on disk" if record.on_disk else "in memory"
        after = "" if record.seconds is None else f" after {record.seconds:.1f} s"
        verdict = "" if accepted else f"; left out: {record.reason}"
        self._say(
            f"round {record.round}: result of {client}{after}: {format_size(record.nbytes)} in {record.tensors} "
            f"tensors, {where}; process memory {format_size(anonymous_bytes())}{verdict}"
        )

    def aggregated(self, seconds: float, took_part: list[str]) -> None:
        """Results were combined."""
        with self._lock:
            if self._record is not None:
                self._record.aggregation_seconds = round(seconds, 3)
                self._record.took_part = list(took_part)

    def end_round(self, *, scratch_bytes: int = 0, scratch_peak_bytes: int = 0) -> RoundRecord | None:
        """End the round, if there is one, and write down what it came to."""
        with self._lock:
            record, self._record = self._record, None
            settled = any(result.accepted is not None for result in self._results.values())
            if record is None or not (settled or self._announced):
                return None
            accepted = [client for client, result in self._results.items() if result.accepted]
            record.took_part = sorted(set(record.took_part or accepted) - self._reasons.keys())
            record.left_out = dict(sorted(self._reasons.items()))
            for client in record.asked:
                if client not in self._results:
                    record.left_out.setdefault(client, "no result came")
            record.received_bytes = sum(result.nbytes for result in self._results.values())
            record.seconds = round(time.monotonic() - self._started, 3)
            record.memory_bytes = anonymous_bytes()
            record.scratch_bytes, record.scratch_peak_bytes = scratch_bytes, scratch_peak_bytes
            self._write("round", asdict(record))
        self._say(_line(record))
        if self._measure is not None:
            self._measure(record)
        return record

    def _write(self, kind: str, content: dict[str, Any]) -> None:
        if self._path is None:
            return
        line = json.dumps({"kind": kind, "time": round(time.time(), 3), **content})
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            self._say(f"cannot write {self._path} ({error}); going on without records")
            self._path = None


def _line(record: RoundRecord) -> str:
    combined = "" if record.aggregation_seconds is None else f", aggregated in {record.aggregation_seconds:.1f} s"
    who = "; ".join(f"{client} ({reason})" for client, reason in record.left_out.items()) or "nobody"
    return (
        f"round {record.round} done in {record.seconds:.1f} s{combined}: {len(record.took_part)} of "
        f"{max(len(record.asked), len(record.took_part))} clients, {format_size(record.received_bytes)} received; "
        f"process memory {format_size(record.memory_bytes)}, scratch {format_size(record.scratch_bytes)} "
        f"(at most {format_size(record.scratch_peak_bytes)}); left out: {who}"
    )
