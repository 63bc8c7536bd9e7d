# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML page that needs no other file and no network.

Text in records is untrusted: it is cut, and all strings but the markup of this module are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import nvflare_lazy
from nvflare_lazy._text import format_size
from nvflare_lazy.report.answers import Answer, answers, at, duration, ranges, shortened
from nvflare_lazy.report.charts import PALETTE, Chart, charts, svg
from nvflare_lazy.report.inline_svg import inline
from nvflare_lazy.report.job_report import JobReport, Process, Traffic

_MAX_ROWS = 100
_SECTIONS = {"memory": "Memory and scratch", "rounds": "Rounds", "clients": "Clients", "metrics": "Metrics"}
_DARK = {
    "ink": "#e6edf3",
    "muted": "#9aa7b4",
    "grid": "#343c45",
    "surface": "#0f141a",
    "panel": "#171d25",
    "c1": "#6cb6ff",
    "c2": "#f0a45d",
    "c3": "#57c98a",
    "c4": "#d2a8ff",
    "c5": "#ff8e85",
    "c6": "#56c7d8",
}
_LIGHT = {**PALETTE, "panel": "#f4f6f8"}
_STYLE = """
:root { color-scheme: light dark; LIGHT }
@media (prefers-color-scheme: dark) { :root { DARK } }
* { box-sizing: border-box }
body { margin: 0; background: var(--surface); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
header, main, footer { max-width: 76rem; margin: 0 auto; padding: 0 1.25rem }
header { padding-top: 1.75rem }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.2rem; margin: 2.25rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--grid) }
h3 { font-size: 1rem; margin: 0 0 .25rem }
p { margin: .25rem 0; max-width: 75ch }
.muted, footer, caption, summary { color: var(--muted) }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; list-style: none; padding: 0; margin: .75rem 0 0 }
a { color: var(--c1); text-underline-offset: .2em }
:focus-visible { outline: 2px solid var(--c1); outline-offset: 2px }
.answers { grid-template-columns: repeat(auto-fit, minmax(min(16.5rem, 100%), 1fr)) }
.answers { margin: 1.25rem 0 0; display: grid; gap: .75rem }
.answers > div { background: var(--panel); border-radius: .5rem; padding: .8rem 1rem }
.answers > div { border-left: .25rem solid var(--grid) }
.answers > .problem { border-left-color: var(--c5) }
dt { color: var(--muted); font-size: .875rem }
dd { margin: 0; overflow-wrap: anywhere }
dd strong { display: block; font-size: 1.15rem; line-height: 1.35 }
dd span { font-size: .9rem }
.charts { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)) }
figure { margin: 0; min-width: 0 }
svg { display: block; width: 100%; height: auto; max-width: 42rem; font-family: system-ui, sans-serif }
summary { cursor: pointer; font-size: .9rem }
.scroll { overflow-x: auto; margin-top: 1.25rem }
details .scroll { margin-top: .5rem }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums }
caption { text-align: left; padding-bottom: .35rem }
th, td { text-align: left; vertical-align: top; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--grid) }
thead th { font-weight: 600; white-space: nowrap }
tbody th { font-weight: 500 }
tbody th { overflow-wrap: anywhere; min-width: 5rem; max-width: 20rem }
td.text { overflow-wrap: anywhere; min-width: 10rem; max-width: 34rem }
td.number, th.number { text-align: right; white-space: nowrap }
footer { padding: 2rem 1.25rem; font-size: .875rem }
@media print { details > * { display: block } .charts { break-inside: avoid } }
"""


class _Html(str):
    """Markup of this module. Every other string is escaped before it becomes a part of the page."""

    __slots__ = ()


def page(report: JobReport) -> str:
    """Return the page of a report."""
    drawn = charts(report)
    title = f"Job {shortened(report.job, 80)}"
    sections = [
        _section(name, heading, [chart for chart in drawn if chart.section == name], report)
        for name, heading in _SECTIONS.items()
    ]
    parts = [*filter(None, sections), _processes(report)]
    names = [*(name for name, section in zip(_SECTIONS, sections, strict=True) if section), "processes"]
    headings = {**_SECTIONS, "processes": "Processes and settings"}
    links = [_tag("li", _tag("a", headings[name], href=f"#{name}")) for name in names]
    style = _STYLE.replace("LIGHT", _variables(_LIGHT)).replace("DARK", _variables(_DARK))
    head = [
        _Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        # Nothing in the page loads or runs anything, whatever the records contain.
        _Html(
            """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">"""
        ),
        _tag("title", f"{title} - nvflare-lazy report"),
        _Html(f"<style>{style}</style>"),
    ]
    when = f"{at(report.started)} to {at(report.last)}; report of {at(report.made)}"
    body = [
        _tag(
            "header",
            _tag("h1", title),
            _tag("p", when, class_="muted"),
            _tag("nav", _tag("ul", *links), aria_label="Sections"),
        ),
        _tag("main", _answers(answers(report)), *parts),
        _tag(
            "footer",
            f"Made by nvflare-lazy {nvflare_lazy.__version__} from the records of the job: nvflare-lazy report. "
            "Times are in UTC; 1 MiB is 1,048,576 bytes; memory is anonymous memory.",
        ),
    ]
    return "<!doctype html>\n" + _tag("html", _tag("head", *head), _tag("body", *body), lang="en") + "\n"


def _variables(colors: dict[str, str]) -> str:
    return "; ".join(f"--{name}: {color}" for name, color in colors.items())


def _tag(name: str, *content: str, class_: str = "", **attributes: str) -> _Html:
    """Return an element; its content is escaped unless it is markup."""
    attributes = {"class": class_, **{key.replace("_", "-"): value for key, value in attributes.items()}}
    written = "".join(f' {key}="{escape(value)}"' for key, value in attributes.items() if value)
    inner = "".join(part if isinstance(part, _Html) else escape(part) for part in content)
    return _Html(f"<{name}{written}>{inner}</{name}>")


def _answers(found: Sequence[Answer]) -> _Html:
    cards = [
        _tag(
            "div",
            _tag("dt", answer.name),
            _tag("dd", _tag("strong", "! " if answer.is_problem else "", answer.short), _tag("span", answer.detail)),
            class_="problem" if answer.is_problem else "",
        )
        for answer in found
    ]
    return _tag("section", _tag("dl", *cards, class_="answers"), aria_label="Answers")


def _section(name: str, heading: str, drawn: Sequence[Chart], report: JobReport) -> _Html | None:
    tables = {"rounds": _rounds, "clients": _clients}
    after = [tables[name](report)] if name in tables else []
    if not drawn and not any(after):
        return None
    figures = [_tag("div", *map(_figure, drawn), class_="charts")] if drawn else []
    return _tag("section", _tag("h2", heading), *figures, *after, id=name)


def _figure(chart: Chart) -> _Html:
    drawing = _Html(inline(svg(chart), chart.name, chart.title, chart.summary, PALETTE))
    numbers = _tag("details", _tag("summary", f"Numbers: {chart.title}"), _table(chart.title, chart.header, chart.rows))
    return _tag("figure", _tag("figcaption", _tag("h3", chart.title)), drawing, numbers)


def _table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[str] = ()) -> _Html:
    """Return a table; the first cell of a row is its header, and columns named in `text` are not numbers."""
    kinds = ["text" if index == 0 or name in text else "number" for index, name in enumerate(header)]
    head = [_tag("th", name, scope="col", class_=kind) for name, kind in zip(header, kinds, strict=True)]
    body = []
    for first, *others in rows:
        cells = [_tag("td", cell, class_=kind) for cell, kind in zip(others, kinds[1:], strict=True)]
        body.append(_tag("tr", _tag("th", first, scope="row"), *cells))
    table = _tag("table", _tag("caption", caption), _tag("thead", _tag("tr", *head)), _tag("tbody", *body))
    # Wide tables are scrolled, also with the keyboard.
    return _tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _rounds(report: JobReport) -> _Html:
    shown = report.rounds[-_MAX_ROWS:]
    header = ("round", "ended", "seconds", "received", "used", "skipped", "memory", "scratch", "aggregated by")
    rows = [
        (
            "none" if each.number is None else str(each.number),
            at(each.time),
            f"{each.seconds:.1f}",
            format_size(each.received_bytes),
            str(each.aggregated),
            str(each.skipped),
            format_size(each.memory_bytes),
            format_size(each.scratch_bytes),
            shortened(each.site, 60),
        )
        for each in shown
    ]
    return (
        _table(_caption("Rounds", len(shown), len(report.rounds)), header, rows, ("ended", "aggregated by"))
        if rows
        else _Html()
    )


def _caption(what: str, shown: int, total: int) -> str:
    return what if shown == total else f"{what}: {shown} of {total:,}; --json has all"


def _clients(report: JobReport) -> _Html:
    if not report.clients:
        return _Html()
    ordered = sorted(
        report.clients, key=lambda client: (-client.delay_seconds, -(client.median_seconds or 0.0), client.name)
    )
    shown = ordered[:_MAX_ROWS]
    header = (
        "client",
        "used",
        "skipped",
        "median, s",
        "slowest, s",
        "last in",
        "delay, s",
        "result",
        "received",
        "sent",
    )
    rows = [
        (
            shortened(each.name, 60),
            str(each.used),
            str(each.skipped),
            "-" if each.median_seconds is None else f"{each.median_seconds:.1f}",
            f"{max(each.seconds.values()):.1f}" if each.seconds else "-",
            str(each.last_in),
            f"{each.delay_seconds:.1f}",
            format_size(each.result_bytes),
            _traffic(each.received),
            _traffic(each.sent),
        )
        for each in shown
    ]
    caption = _caption("Clients, those that delay the rounds most first", len(shown), len(ordered))
    parts = [_table(caption, header, rows, ("received", "sent"))]
    skips = [
        (shortened(skip.client, 60), ranges(skip.rounds), shortened(skip.reason, 300))
        for skip in report.skips[:_MAX_ROWS]
    ]
    if skips:
        caption = _caption("Skipped results", len(skips), len(report.skips))
        parts.append(_table(caption, ("client", "rounds", "reason"), skips, ("rounds", "reason")))
    return _Html("".join(parts))


def _traffic(traffic: Traffic | None) -> str:
    if traffic is None:
        return "not recorded"
    ways = ", ".join(shortened(way, 40) for way in list(traffic.ways)[:3])
    return f"{format_size(traffic.nbytes)} in {duration(traffic.seconds)} {ways}"


def _processes(report: JobReport) -> _Html:
    shown = report.processes[:_MAX_ROWS]
    header = ("process", "role", "state", "memory peak", "scratch peak", "free for scratch at the start", "records")
    rows = [
        (
            shortened(each.name, 60),
            shortened(each.role, 20),
            _state(each),
            format_size(each.memory_peak.nbytes) if each.memory_peak else "-",
            format_size(each.scratch_peak.nbytes) if each.scratch_peak else "-",
            "-" if each.scratch_free_bytes is None else format_size(each.scratch_free_bytes),
            shortened(each.file, 300),
        )
        for each in shown
    ]
    caption = _caption("Processes", len(shown), len(report.processes))
    parts = [_table(caption, header, rows, ("role", "state", "records"))]
    for each in shown:
        # A trainer has those of its client job.
        if each.role in ("server", "client") and (each.settings or each.versions):
            pairs = {**each.settings, **{f"version of {name}": version for name, version in each.versions.items()}}
            listed = [
                (shortened(name, 60), shortened(str(value), 200)) for name, value in list(pairs.items())[:_MAX_ROWS]
            ]
            summary = f"Settings and versions of {shortened(each.name, 60)}"
            parts.append(
                _tag("details", _tag("summary", summary), _table(summary, ("setting", "value"), listed, ("value",)))
            )
            if len(parts) > 8:
                break
    return _tag("section", _tag("h2", "Processes and settings"), *parts, id="processes")


def _state(process: Process) -> str:
    state = process.status or "no record of its end"
    if process.reason:
        state += f": {shortened(process.reason)}"
    return state + (f"; unreadable lines: {process.damaged:,}" if process.damaged else "")
