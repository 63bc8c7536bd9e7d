# SPDX-License-Identifier: Apache-2.0
"""`RoundLog`: log lines, JSON records and metrics of each round.

`TensorOffload` reports NVFlare's events, and `LazyAggregator` reports aggregations. Each round becomes an INFO line, a
line of JSON in the job's run directory, and metrics for NVFlare's analytics receivers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nvflare_lazy._system import anonymous_bytes
from nvflare_lazy._text import format_size
from nvflare_lazy.aggregation import Progress
from nvflare_lazy.records import ContributionRecord, Record, RecordWriter, RoundRecord, TransferRecord
from nvflare_lazy.records.schema import MAX_ENTRIES, now

# Of all clients together; a payload counts for each part of its cell's name.
_MAX_TRANSFERS = 16 << 10


@dataclass(frozen=True)
class RunningRound:
    """The state of a running round.

    Attributes:
        number: Its number, or None in a workflow without rounds.
        tasked: Clients that received the task.
        results: Bytes of the results that were received, and 0 for clients whose tasks failed.
        aggregation: Progress of the running pass of the aggregation, or None.
    """

    number: int | None
    tasked: tuple[str, ...]
    results: dict[str, int]
    aggregation: Progress | None


class RoundLog:
    """Collects the events of a round, and logs them line by line and as records in a file, if there is one.

    `on_round_end` gets the record of each round, to send its metrics. `explain` returns the end of a reason if a client
    failed: its last error, or which of its logs to read. `warn` logs that records cannot be written. Default: `log`.
    """

    def __init__(
        self,
        path: Path | None,
        log: Callable[[str], None],
        on_round_end: Callable[[RoundRecord], None] | None = None,
        explain: Callable[[str], str] = lambda client: "",
        *,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.writer = None if path is None else RecordWriter(path, warn or log)
        self._explain = explain
        self._log = log
        self._on_round_end = on_round_end
        self.last_model: str | None = None
        self._lock = threading.RLock()
        self._record: RoundRecord | None = None
        self._started = 0.0
        self._aggregation: Progress | None = None
        self._announced = True
        self._sent: dict[str, float] = {}
        # Results without a verdict: some controllers, such as NVFlare's `CyclicController`, report none.
        self._unjudged: dict[str, ContributionRecord] = {}
        self._judged: dict[str, ContributionRecord] = {}
        self._reasons: dict[str, str] = {}
        # Clients whose reason ends with what `explain` returns when it is reported.
        self._failed: set[str] = set()
        # The rounds of tasks without an answer: a client whose trainer hangs does not take the task of the next round.
        self._unanswered: dict[str, int | None] = {}
        self._lost: set[str] = set()
        self._has_failed = False
        # Seconds and ways of transfers since the last task of a client, by their direction and each part of the cell's
        # name, of which the client is one.
        self._transfers: dict[tuple[str, str], tuple[float, set[str]]] = {}
        # A client can send further results, for tasks that do not exist. They change nothing about the accepted one.
        self._accepted: set[str] = set()

    def start_round(self, number: int | None, *, announced: bool = True) -> None:
        """Start a round.

        Args:
            number: Its number.
            announced: Whether the controller announces rounds. Rounds of other controllers are only logged if they have
                results.
        """
        with self._lock:
            self._record, self._started, self._announced = RoundRecord(round=number), time.monotonic(), announced
            self._aggregation = None
            self._sent.clear()
            self._unjudged.clear()
            self._judged.clear()
            self._reasons.clear()
            self._failed.clear()
            self._accepted.clear()
            self._has_failed = False

    def on_task_sent(self, client: str) -> None:
        """Record that a client received the task of the round."""
        with self._lock:
            self._sent[client] = time.monotonic()
            for direction in ("sent", "received"):
                self._take_transfers(direction, client)
            self._unanswered[client] = self._record.round if self._record else None
            self._lost.discard(client)
            if self._record is not None and client not in self._record.tasked:
                self._record.tasked.append(client)

    def on_answer(self, client: str) -> None:
        """Record that a client has answered its task, in any way."""
        with self._lock:
            self._unanswered.pop(client, None)

    def on_lost(self, client: str) -> None:
        """Record that NVFlare has given up a client."""
        with self._lock:
            self._lost.add(client)

    def on_transfer(self, transfer: TransferRecord) -> None:
        """Keep the record of a transfer until the result of its client is recorded."""
        with self._lock:
            for key in ((transfer.direction, part) for part in transfer.peer.split(".")):
                if key in self._transfers or len(self._transfers) < _MAX_TRANSFERS:
                    seconds, ways = self._transfers.get(key, (0.0, set()))
                    self._transfers[key] = seconds + transfer.seconds, ways | {transfer.way}

    def _take_transfers(self, direction: str, client: str) -> tuple[float | None, str | None]:
        """Return the duration and the way of a client's transfer, or None if it is unknown."""
        found = self._transfers.pop((direction, client), None)
        return (None, None) if found is None else (round(found[0], 3), " and ".join(sorted(filter(None, found[1]))))

    def on_result(self, client: str, nbytes: int, tensors: int, *, on_disk: bool) -> None:
        """Record that the result of a client was received."""
        with self._lock:
            self._unanswered.pop(client, None)
            sent = self._sent.get(client)
            transfer_seconds, way = self._take_transfers("received", client)
            task_seconds, _ = self._take_transfers("sent", client)
            self._unjudged[client] = ContributionRecord(
                client=client,
                round=self._record.round if self._record else None,
                nbytes=nbytes,
                tensors=tensors,
                on_disk=on_disk,
                seconds=None if sent is None else round(time.monotonic() - sent, 3),
                task_seconds=task_seconds,
                transfer_seconds=transfer_seconds,
                way=way or None,
            )

    def on_metrics(self, client: str, metrics: Mapping[str, float]) -> None:
        """Record the metrics that a client reports with its result."""
        with self._lock:
            if client in self._unjudged:
                self._unjudged[client].metrics = dict(metrics)

    def on_skip(self, client: str, reason: str, *, failed: bool = False) -> bool:
        """Record why the result of a client is not used, and return whether it is the first reason, which counts.

        Args:
            client: The client.
            reason: The reason.
            failed: Whether the client failed, so that its log has more.
        """
        with self._lock:
            is_first = client not in self._reasons
            if is_first and failed:
                self._failed.add(client)
            self._reasons.setdefault(client, reason)
            return is_first

    def on_verdict(self, client: str, *, accepted: bool) -> None:
        """Record and log whether the result of a client was accepted."""
        with self._lock:
            record = self._unjudged.pop(client, None)
            if accepted:
                self._accepted.add(client)
            if record is None:
                if accepted:
                    return  # an evaluation, which has no tensors
                record = ContributionRecord(client=client, round=self._record.round if self._record else None)
            self._judged[client] = record
            record.accepted = accepted
            if not accepted:
                self._reasons.setdefault(client, "rejected by the controller or aggregator")
                record.reason = self._reason(client)
            self._report(record)

    def _report(self, record: ContributionRecord) -> None:
        if len(self._judged) + len(self._unjudged) <= MAX_ENTRIES:
            self.write(record)
        if record.reason is not None and not record.tensors:
            self._log(_in_round(record.round, f"the result of {record.client} is not used: {record.reason}"))
            return
        where = "on disk" if record.on_disk else "in memory"
        size = f"{format_size(record.nbytes)} in {record.tensors} tensors, {where}" if record.tensors else "no tensors"
        after = "" if record.seconds is None else f" after {record.seconds:.1f} s"
        unused = "" if record.reason is None else f"; not used: {record.reason}"
        line = f"received the result of {record.client}{after}: {size}; memory {format_size(anonymous_bytes())}{unused}"
        self._log(_in_round(record.round, line))

    def on_aggregation_progress(self, progress: Progress) -> None:
        """Note the progress of the running aggregation."""
        self._aggregation = progress

    def running(self) -> RunningRound | None:
        """Return the state of the running round, or None between rounds."""
        with self._lock:
            if self._record is None:
                return None
            results = {client: result.nbytes for client, result in (self._unjudged | self._judged).items()}
            return RunningRound(
                self._record.round,
                tuple(self._record.tasked),
                dict.fromkeys(self._reasons, 0) | results,
                self._aggregation,
            )

    def on_aggregated(self, seconds: float, clients: list[str], metrics: Mapping[str, float] | None = None) -> None:
        """Record an aggregation, with the mean of the clients' metrics."""
        with self._lock:
            self._aggregation = None
            if self._record is not None:
                self._record.aggregation_seconds = round(seconds, 3)
                self._record.aggregated = list(clients)
                self._record.metrics = dict(metrics or {})

    def on_saved(self, model: Path) -> None:
        """Record a checkpoint: that of the round, or one that is saved after the last round, as in swarm learning."""
        with self._lock:
            self.last_model = str(model)
            if self._record is not None:
                self._record.model = str(model)

    def on_failure(self) -> None:
        """Record that the round ends without a new model."""
        with self._lock:
            self._has_failed = True

    def end_round(
        self,
        *,
        scratch_bytes: int = 0,
        scratch_peak_bytes: int = 0,
        memory_peak_bytes: int = 0,
        transport: dict[str, int] | None = None,
    ) -> RoundRecord | None:
        """End the round, if there is one, and log its record."""
        with self._lock:
            record, self._record = self._record, None
            if record is not None:
                for result in self._unjudged.values():
                    result.reason = self._reason(result.client)
                    self._report(result)
            is_relay = bool(self._unjudged) and not self._judged and not self._accepted
            results = {**self._unjudged, **self._judged}
            self._unjudged.clear()
            is_evaluation = not results and not self._reasons and bool(self._accepted)
            if record is None or is_evaluation or not (results or self._announced):
                return None
            # Without a report of the aggregation, it used all accepted results.
            aggregated = self._accepted if record.aggregation_seconds is None else set(record.aggregated)
            aggregated = set() if self._has_failed else aggregated
            skipped = dict.fromkeys(self._accepted, "not aggregated") | self._reasons_of(record, {*results})
            record.aggregated = sorted(aggregated)
            record.skipped = {client: reason for client, reason in sorted(skipped.items()) if client not in aggregated}
            record.received_bytes = sum(result.nbytes for result in results.values())
            record.seconds = round(time.monotonic() - self._started, 3)
            record.time = now()
            record.memory_bytes = anonymous_bytes()
            record.scratch_bytes, record.scratch_peak_bytes = scratch_bytes, scratch_peak_bytes
            record.memory_peak_bytes = max(memory_peak_bytes, record.memory_bytes)
            record.transport = dict(sorted((transport or {}).items()))
            record.counts = {name: len(getattr(record, name)) for name in ("tasked", "aggregated", "skipped")}
            record.clients = _worst(results)
            self.write(record)
            failed = self._has_failed
        self._log(_line(record, len(results) if is_relay else None, " failed after " if failed else " finished in "))
        if self._on_round_end is not None:
            self._on_round_end(record)
        return record

    def outcomes(self, clients: Iterable[str] = ()) -> str:
        """Return for each client of the round, and each of `clients`, whether its result counts, or why not."""
        with self._lock:
            if self._record is None:
                return ""
            reasons = self._reasons_of(self._record, {*self._unjudged, *self._judged})
            accepted = sorted(self._accepted - reasons.keys())
            known = {*accepted, *reasons}
            waiting = sorted(client for client in clients if client not in known)
        parts = [f"{client} ({reason})" for client, reason in sorted(reasons.items())]
        for names, outcome in ((waiting, "had no task in this round"), (accepted, "accepted")):
            parts += [f"{', '.join(names)} ({outcome})"] if names else []
        return "; ".join(parts)

    def _reason(self, client: str) -> str | None:
        reason = self._reasons.get(client)
        return reason if reason is None or client not in self._failed else reason + self._explain(client)

    def _reasons_of(self, record: RoundRecord, answered: set[str]) -> dict[str, str]:
        """Return why results of clients are not used, in this round or for clients that still had another task."""
        reasons = {client: self._reason(client) or "" for client in self._reasons}
        for client, number in self._unanswered.items():
            if client in answered or client in self._accepted or client in reasons:
                continue
            lost = "lost: no contact" if client in self._lost else "no result received"
            since = "" if client in record.tasked or number is None else f" since round {number}"
            reasons[client] = f"{lost}{since}{self._explain(client)}"
        return reasons

    def write(self, record: Record) -> None:
        """Append a record to the file, if there is one."""
        if self.writer is not None:
            self.writer.write(record)


def _worst(results: Mapping[str, ContributionRecord]) -> dict[str, ContributionRecord]:
    """Return the results by client; of very many, only unused ones and the slowest ones."""
    ordered = sorted(results.values(), key=lambda result: (result.reason is None, -(result.seconds or 0.0)))
    return {result.client: result for result in sorted(ordered[:MAX_ENTRIES], key=lambda result: result.client)}


def _in_round(number: int | None, line: str) -> str:
    return line[0].upper() + line[1:] if number is None else f"Round {number}: {line}"


def _ways(transport: dict[str, int]) -> tuple[str, ...]:
    """Return how tensors were received; with sizes only if there was more than one way."""
    if len(transport) > 1:
        return (f"({', '.join(f'{format_size(nbytes)} {way}' for way, nbytes in transport.items())})",)
    return tuple(transport)


def _line(record: RoundRecord, relayed: int | None, ended: str) -> str:
    aggregation = "" if record.aggregation_seconds is None else f" (aggregation {record.aggregation_seconds:.1f} s)"
    skipped = "; ".join(f"{client} ({reason})" for client, reason in record.skipped.items()) or "none"
    received = " ".join((format_size(record.received_bytes), *_ways(record.transport)))
    if relayed is None:
        of = max(len(record.tasked), len(record.aggregated))
        done = f"aggregated {len(record.aggregated)} of {of} results, received {received}"
    else:
        done = f"received {relayed} results, {received}"
    return (
        f"{'A round' if record.round is None else f'Round {record.round}'}{ended}{record.seconds:.1f} s"
        f"{aggregation}: {done}; "
        f"memory {format_size(record.memory_bytes)}, scratch {format_size(record.scratch_bytes)} "
        f"(peak {format_size(record.scratch_peak_bytes)}); skipped: {skipped}"
    )
