# SPDX-License-Identifier: Apache-2.0
"""`RoundProgress`: what a running round has received and aggregated so far, for the log, a terminal and metrics.

A thread of `TensorOffload` reads the counts of the running downloads. Lines are rare: only long transfers and
aggregations cause them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nvflare_lazy._text import format_size
from nvflare_lazy.aggregation import Progress
from nvflare_lazy.flare.accepted_result import shown
from nvflare_lazy.flare.round_log import RunningRound
from nvflare_lazy.transport.running_downloads import DownloadProgress

#: Seconds of transfer or aggregation before the first line, and between two lines.
SECONDS_BETWEEN_LINES = 30.0
_SECONDS_BETWEEN_LOOKS = 0.5
_MAX_CLIENTS_IN_LINE = 5


@dataclass(frozen=True)
class ClientProgress:
    """The result of one client.

    Attributes:
        received: Bytes received so far.
        total: Bytes of the result; None while they are unknown.
        is_complete: Whether nothing more is expected: the result was received, or the task failed.
    """

    client: str
    received: int
    total: int | None
    is_complete: bool

    @property
    def share(self) -> float:
        """The part that was received, from 0 to 1."""
        return _share(self.received, self.total)


@dataclass(frozen=True)
class ProgressReport:
    """The progress of a running round.

    Attributes:
        number: Number of the round, or None in a workflow without rounds.
        clients: All clients with the task, by name.
        arriving: The clients whose results are being received, the one with the smallest part first.
        received: Bytes received so far.
        total: Bytes of all results; None while they are unknown.
        is_estimate: Whether `total` assumes that results of unknown size are as large as the others, or as the model.
        rate: Bytes received per second, lately.
        aggregation: Progress of the running pass of the aggregation, or None.
    """

    number: int | None
    clients: tuple[ClientProgress, ...]
    arriving: tuple[ClientProgress, ...]
    received: int
    total: int | None
    is_estimate: bool
    rate: float
    aggregation: Progress | None

    @property
    def is_active(self) -> bool:
        """Whether something is being received or aggregated."""
        return bool(self.arriving) or self.aggregation is not None

    @property
    def completed(self) -> int:
        """The number of clients from which nothing more is expected."""
        return sum(client.is_complete for client in self.clients)

    @property
    def share(self) -> float:
        """The part of the running step that is done, from 0 to 1: of the aggregation, else of the results."""
        if self.aggregation is not None:
            return _share(self.aggregation.done, self.aggregation.total)
        return _share(self.received, self.total)

    def numbers(self) -> dict[str, float]:
        """Return the numbers of the report, as metrics."""
        numbers = {"progress_bytes": float(self.received), "progress_results": float(self.completed)}
        if self.total is not None:
            numbers["progress_percent"] = round(100 * _share(self.received, self.total), 1)
        if self.aggregation is not None:
            numbers["aggregation_percent"] = round(100 * self.share, 1)
        return numbers

    def step(self) -> str:
        """Return the name of the running step, its share and its bytes, such as "mean 42 % (1.7 GiB of 4.0 GiB)"."""
        if self.aggregation is not None:
            done, total = format_size(self.aggregation.done), format_size(self.aggregation.total)
            return f"{self.aggregation.stage} {_percent(self.share)} ({done} of {total})"
        if self.total is None:
            return f"received {format_size(self.received)}"
        about = "about " if self.is_estimate else ""
        sizes = f"{format_size(self.received)} of {about}{format_size(self.total)}"
        return f"received {_percent(self.share)} ({sizes})"

    def line(self) -> str:
        """Return a line for the log."""
        begin = "" if self.number is None else f"Round {self.number}: "
        if self.aggregation is not None:
            return f"{begin}aggregating, {self.step()}"
        rate = f", {format_size(int(self.rate))}/s" if self.rate > 0 else ""
        listed = [
            f"{shown(client.client)} {format_size(client.received)}"
            + ("" if client.total is None else f" of {format_size(client.total)}")
            for client in self.arriving[:_MAX_CLIENTS_IN_LINE]
        ]
        if len(self.arriving) > len(listed):
            listed.append(f"{len(self.arriving) - len(listed)} more")
        line = (
            f"{begin}{self.step()}, {self.completed} of {len(self.clients)} results complete{rate}; "
            f"in progress: {', '.join(listed)}"
        )
        return line[0].upper() + line[1:]


class RoundProgress:
    """Reads the progress of a running round regularly, in its own thread, between `start()` and `stop()`.

    Args:
        running: Returns the running round.
        downloads: Returns the progress of the running downloads of this process.
        model_bytes: Returns the size of the model, or 0 while it is unknown.
        on_line: Called with a report that is due for the log, at most every `SECONDS_BETWEEN_LINES`.
        on_look: Called with each report, and with None between rounds; for a terminal.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        running: Callable[[], RunningRound | None],
        downloads: Callable[[], Iterable[DownloadProgress]],
        model_bytes: Callable[[], int],
        on_line: Callable[[ProgressReport], object],
        on_look: Callable[[ProgressReport | None], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._running = running
        self._downloads = downloads
        self._model_bytes = model_bytes
        self._on_line = on_line
        self._on_look = on_look
        self._clock = clock
        # The time since which the round is active, or of the last line, and the bytes that were received then.
        self._mark: tuple[float, int] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvflare-lazy-progress", daemon=True)

    def start(self) -> None:
        """Start to look."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, and wait for a look in progress."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_SECONDS_BETWEEN_LOOKS):
            self.look()

    def look(self) -> ProgressReport | None:
        """Look once: return the report, after passing it on if it is due."""
        now = self._clock()
        report = self._report(now)
        if report is None or not report.is_active:
            self._mark = None
        elif self._mark is None or report.received < self._mark[1]:
            self._mark = now, report.received
        elif now - self._mark[0] >= SECONDS_BETWEEN_LINES:
            self._on_line(report)
            self._mark = now, report.received
        if self._on_look is not None:
            self._on_look(report)
        return report

    def _report(self, now: float) -> ProgressReport | None:
        running = self._running()
        if running is None:
            return None
        arriving: dict[str, tuple[int, int | None]] = {}
        tasked = set(running.tasked)
        for download in self._downloads():
            # A cell is named by its path, of which one part is the client, also behind relays and with trainers.
            client = next((part for part in download.sender.split(".") if part in tasked), None)
            if client is not None and client not in running.results:
                received, total = arriving.get(client, (0, 0))
                both = None if total is None or download.total is None else total + download.total
                arriving[client] = received + download.received, both
        clients = tuple(
            ClientProgress(client, running.results[client], running.results[client], True)
            if client in running.results
            else ClientProgress(client, *arriving.get(client, (0, None)), False)
            for client in sorted(tasked)
        )
        usual = max((client.total or 0 for client in clients), default=0) or self._model_bytes()
        totals = [max(client.received, usual) if client.total is None else client.total for client in clients]
        received = sum(client.received for client in clients)
        since, before = self._mark or (now, received)
        return ProgressReport(
            running.number,
            clients,
            tuple(sorted((client for client in clients if client.client in arriving), key=lambda found: found.share)),
            received,
            sum(totals) if usual else None,
            any(client.total is None for client in clients),
            (received - before) / (now - since) if now > since else 0.0,
            running.aggregation,
        )


def _share(done: int, total: int | None) -> float:
    return min(done / total, 1.0) if total else 0.0


def _percent(share: float) -> str:
    # 100 % means complete.
    return f"{int(100 * share)} %"
