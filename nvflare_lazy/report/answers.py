# SPDX-License-Identifier: Apache-2.0
"""The answers of a report in sentences: state, clients, peaks, disk, model and transport.

The page, the picture and the terminal show the same ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import PurePath

from nvflare_lazy._text import format_size, printable
from nvflare_lazy.report.job_report import JobReport

_MAX_TEXT = 160
_MAX_LISTED = 3
# A slow client makes all rounds longer by at least this part.
_NOTABLE = 0.05


@dataclass(frozen=True)
class Answer:
    """The answer of a report to one question.

    Attributes:
        name: The question, in a word or two.
        short: The answer, in a few words.
        detail: The rest of it.
        is_problem: Whether it needs attention.
    """

    name: str
    short: str
    detail: str
    is_problem: bool = False

    @property
    def text(self) -> str:
        """The whole answer in one line."""
        return f"{self.short}; {self.detail}" if self.detail else self.short


def answers(report: JobReport) -> list[Answer]:
    """Return the answers for a job."""
    return [
        _state(report),
        _slowest(report),
        _skipped(report),
        _peak(report),
        _disk(report),
        _model(report),
        _ways(report),
    ]


def at(moment: float) -> str:
    """Return a time as text; in UTC, since the records of a job may come from several places."""
    try:
        return datetime.fromtimestamp(moment, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return f"{moment:.3g} s after 1970"  # of a damaged record


def duration(seconds: float) -> str:
    """Return a duration as text."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 120 else f"{hours:.1f} h"


def shortened(text: str, length: int = _MAX_TEXT) -> str:
    """Return untrusted text printable and cut."""
    text = printable(text)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def ranges(rounds: Sequence[int | None]) -> str:
    """Return numbers of rounds as text, such as "0, 2-5"."""
    numbers = sorted({each for each in rounds if each is not None})
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    text = [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[1]}" for part in parts]
    return ", ".join([*text[:20], *(["..."] if len(text) > 20 else [])]) or "unnumbered"


def _state(report: JobReport) -> Answer:
    resumed = f", resumed {_times(len(report.starts) - 1)}" if len(report.starts) > 1 else ""
    done = f"{_count(len(report.rounds), 'round')} in {duration(report.running_seconds)}{resumed}"
    if report.status is None:
        ago = duration(max(0.0, report.made - report.last))
        return Answer(
            "State", "running or killed", f"{done}; no record of its end; last record {ago} before this report", True
        )
    reason = f": {shortened(report.reason)}" if report.reason else ""
    return Answer("State", report.status, f"{done}{reason}", report.status != "finished")


def _slowest(report: JobReport) -> Answer:
    timed = [client for client in report.clients if client.median_seconds is not None]
    if not timed:
        return Answer("Slowest client", "unknown", "the records have no times of clients")
    slowest = max(timed, key=lambda client: (client.delay_seconds, client.median_seconds or 0.0))
    name, median = shortened(slowest.name, 40), slowest.median_seconds or 0.0
    if len(timed) == 1:
        return Answer("Slowest client", name, f"the only one, {duration(median)} for a result")
    total = sum(each.seconds for each in report.rounds) or 1.0
    last_in = f"last in {slowest.last_in} of {_count(len(report.rounds), 'round')}"
    if slowest.delay_seconds < _NOTABLE * total:
        longest = max(timed, key=lambda client: client.median_seconds or 0.0)
        return Answer(
            "Slowest client",
            "no slow client",
            f"{shortened(longest.name, 40)} has the longest median, {duration(longest.median_seconds or 0.0)}; "
            f"no client delays the rounds by {_NOTABLE:.0%}",
        )
    transfer = slowest.transfer_seconds
    of_it = f", {duration(transfer)} of it transfer" if transfer is not None else ""
    return Answer(
        "Slowest client",
        name,
        f"median {duration(median)}{of_it}; {last_in}; without it the rounds take "
        f"{duration(slowest.delay_seconds)} less ({slowest.delay_seconds / total:.0%})",
    )


def _skipped(report: JobReport) -> Answer:
    results = sum(each.skipped for each in report.rounds)
    if results <= 0:
        contributed = "every client with a task contributed to its round" if report.rounds else "no round has ended"
        return Answer("Skipped", "none", contributed)
    most = sorted(report.skips, key=lambda skip: -len(skip.rounds))[:_MAX_LISTED]
    parts = [f"{shortened(skip.client, 40)} in round {ranges(skip.rounds)}: {shortened(skip.reason)}" for skip in most]
    if len(report.skips) > len(most):
        parts.append(f"{_count(len(report.skips) - len(most), 'other reason')} below")
    short = _count(results, "result")
    clients = len({skip.client for skip in report.skips})
    # Records of many rounds or clients have the numbers of all results, and the reasons of some.
    unlisted = results - sum(len(skip.rounds) for skip in report.skips)
    if unlisted > 0:
        parts.append(f"the records have no reasons for {_count(unlisted, 'result')}")
    if clients:
        short = f"{'at least ' if unlisted > 0 else ''}{_count(clients, 'client')}, {short}"
    return Answer("Skipped", short, "; ".join(parts), True)


def _peak(report: JobReport) -> Answer:
    peaks = [(each, each.memory_peak) for each in report.processes]
    known = sorted(((each, peak) for each, peak in peaks if peak), key=lambda each: -each[1].nbytes)
    if not known:
        return Answer("Memory peak", "unknown", "the records have no samples")
    # The server's is the one that grows without this package; in swarm learning the server aggregates nothing.
    aggregates = {each.site for each in report.rounds}
    process, peak = next((each for each in known if each[0].role == "server" and each[0].name in aggregates), known[0])
    during = "between rounds" if peak.round is None else f"in round {peak.round}"
    text = f"{during}, {duration(peak.seconds)} after the start ({at(peak.time)})"
    highest, its_peak = known[0]
    if highest is not process:
        text += f"; highest of all processes: {shortened(highest.name, 40)}, {format_size(its_peak.nbytes)}"
    return Answer("Memory peak", f"{format_size(peak.nbytes)} in {shortened(process.name, 40)}", text)


def _disk(report: JobReport) -> Answer:
    peaks = [(each, each.scratch_peak) for each in report.processes]
    used = [(process, peak) for process, peak in peaks if peak and peak.nbytes]
    if not used:
        return Answer("Disk for a next run", "no scratch", "the job received nothing to disk")
    by_role: dict[str, list[int]] = defaultdict(list)
    for process, peak in used:
        by_role[process.role].append(peak.nbytes)
    parts = [
        f"{role} {format_size(max(sizes))}" if len(sizes) == 1 else f"each {role} up to {format_size(max(sizes))}"
        for role, sizes in by_role.items()
    ]
    total = sum(peak.nbytes for _, peak in used)
    size = (
        report.model.nbytes
        if report.model and report.model.nbytes
        else max((c.result_bytes for c in report.clients), default=0)
    )
    models = f"; plus {format_size(size)} for each model that it saves" if size else ""
    at_least = "so far, " if report.status is None else ""
    free = [each.scratch_free_bytes for each in report.processes if each.scratch_free_bytes is not None]
    had = f"; at the start, {format_size(min(free))} were free" if free else ""
    _, highest = max(used, key=lambda each: each[1].nbytes)
    return Answer(
        "Disk for a next run",
        f"{format_size(total)} of scratch",
        f"{at_least}{', '.join(parts)}, all on one disk in the worst case; the highest peak was "
        f"{duration(highest.seconds)} after the start{models}{had}",
    )


def _model(report: JobReport) -> Answer:
    if report.model is None:
        return Answer("Model", "not recorded", "no round has saved a model with LazyModelPersistor")
    model = report.model
    size = "not at this path on this machine" if model.nbytes is None else format_size(model.nbytes)
    number = "" if model.round is None else f" after round {model.round}"
    text = f"{shortened(model.path, 300)}: {size}, saved by {shortened(model.site, 40)}{number}"
    return Answer("Model", shortened(PurePath(model.path).name, 60), text)


def _ways(report: JobReport) -> Answer:
    ways: Counter[str] = Counter()
    for each in report.rounds:
        ways.update(each.transport)
    total = sum(ways.values())
    if not total:
        return Answer("Transport", "unknown", "no round has received tensors")
    parts = ", ".join(
        f"{shortened(way, 40)} {format_size(nbytes)}" for way, nbytes in ways.most_common(_MAX_LISTED + 1)
    )
    return Answer("Transport", shortened(ways.most_common(1)[0][0], 40), f"{format_size(total)} received: {parts}")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number:,} times"
