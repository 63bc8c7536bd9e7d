# SPDX-License-Identifier: Apache-2.0
"""The charts of a report, each with its numbers as a table: as SVG for the page, and together as one picture.

Series differ in marker, dash or hatch and have their names at the line, so that a chart can be read without color. The
page replaces the colors of `PALETTE` by its own for light and dark.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from nvflare_lazy._text import format_size, printable
from nvflare_lazy.report.answers import shortened
from nvflare_lazy.report.job_report import Client, JobReport, Point, Process, Round

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Color of the picture for each variable of the page.
PALETTE = {
    "ink": "#1b1f24",
    "muted": "#59636e",
    "grid": "#d1d9e0",
    "surface": "#fefefe",
    "c1": "#0b5cad",
    "c2": "#b35901",
    "c3": "#1a7f4b",
    "c4": "#7d3c98",
    "c5": "#b3261e",
    "c6": "#0b7286",
}
_SERIES = [PALETTE[f"c{number}"] for number in range(1, 7)]
_MARKERS = "osD^vP"
_MARKS = "●■◆▲▼✚"  # the same as characters, for names of series
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1)), (0, (8, 2)))
_HATCHES = ("", "////", "---", "xxx", "\\\\\\\\", "|||")  # those with dots or circles make a page ten times as large
_MAX_SERIES = 6
_MAX_CLIENTS = 12
_MAX_BARS = 30
_MAX_MARKS = 8
_MAX_METRICS = 6
_MAX_ROWS = 60
_MAX_NAME = 22
_WIDTH, _HEIGHT = 4.6, 2.9  # inches of 72 points; small, so that text is readable on a phone


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        name: Identifies it in the page.
        title: What it shows.
        summary: The same in a sentence with the most important numbers, for readers who do not see the chart.
        draw: Draws it.
        header: Column titles of the table of its numbers.
        rows: The numbers.
        section: The section of the page that it belongs to: `memory`, `rounds`, `clients` or `metrics`.
    """

    name: str
    title: str
    summary: str
    draw: Callable[[Axes], None]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    section: str


def charts(report: JobReport) -> list[Chart]:
    """Return the charts that the records of a job have numbers for."""
    found = [
        *_over_time("memory", "Memory of each process", report, lambda process: (process.memory, process.memory_peak)),
        *_over_time("scratch", "Scratch in use", report, lambda process: (process.scratch, process.scratch_peak)),
    ]
    if any(each.seconds for each in report.rounds):
        found.append(_durations(report.rounds))
    if any(each.transport for each in report.rounds):
        found.append(_bytes_by_way(report.rounds))
    clients = [client for client in report.clients if client.seconds]
    if clients:
        found.append(_client_times(clients))
    if any(client.traffic for client in report.clients):
        found.append(_client_traffic(report.clients))
    for name, series in list(report.metrics.items())[:_MAX_METRICS]:
        found.append(_metric(f"metric{len(found)}", name, series))
    return found


def svg(chart: Chart) -> str:
    """Draw a chart as an SVG document with text as text."""
    with _style():
        figure = _figure(_WIDTH, _HEIGHT)
        chart.draw(figure.add_subplot())
        output = io.StringIO()
        figure.savefig(output, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return output.getvalue()


def png(report: JobReport, lines: Sequence[tuple[str, str]]) -> bytes:
    """Draw all charts as one picture, below lines of text that have a name each."""
    drawn = charts(report)
    rows = max(1, (len(drawn) + 1) // 2)
    head = 0.8 + 0.24 * len(lines)
    with _style():
        figure = _figure(2 * _WIDTH, rows * (_HEIGHT + 0.2) + head)
        parts: Any = figure.subfigures(2, 1, height_ratios=[head, rows * (_HEIGHT + 0.2)])
        top, below = parts
        for index, (name, text) in enumerate([("", f"Job {shortened(report.job, 60)}"), *lines]):
            y = 1 - (0.25 + 0.24 * index) / head
            style: dict[str, Any] = {"weight": "bold", "fontsize": 13} if not name else {}
            top.text(0.02, y, name, color=PALETTE["muted"], va="center")
            top.text(0.2 if name else 0.02, y, shortened(text, 108), va="center", **style)
        for index, chart in enumerate(drawn):
            axes = below.add_subplot(rows, 2, index + 1)
            chart.draw(axes)
            axes.set_title(chart.title, loc="left", weight="bold", pad=24)
        output = io.BytesIO()
        figure.savefig(output, format="png", dpi=144)
    return output.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib as mpl

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "nvflare-lazy",
        "text.parse_math": False,  # names come from clients
        "axes.formatter.use_mathtext": False,
        "axes.unicode_minus": False,
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.titlesize": 10,
        "hatch.linewidth": 0.6,
        "figure.facecolor": PALETTE["surface"],
        "axes.facecolor": "none",
        "axes.edgecolor": PALETTE["muted"],
        "axes.labelcolor": PALETTE["muted"],
        "text.color": PALETTE["ink"],
        "xtick.color": PALETTE["muted"],
        "ytick.color": PALETTE["muted"],
        "grid.color": PALETTE["grid"],
    }
    with mpl.rc_context(settings), warnings.catch_warnings():
        # The browser has fonts for the characters that matplotlib's own font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        yield


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _prepare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.6)
    axes.set_axisbelow(True)


def _over_time(
    name: str, title: str, report: JobReport, of: Callable[[Process], tuple[tuple[Point, ...], Point | None]]
) -> list[Chart]:
    series = [(process, *of(process)) for process in report.processes]
    known = [(process, points, peak) for process, points, peak in series if points and peak and peak.nbytes]
    if not known:
        return []
    known.sort(key=lambda each: (each[0].role != "server", -each[2].nbytes))
    owner, _, highest = max(known, key=lambda each: each[2].nbytes)
    unit, factor = _size_unit(highest.nbytes)
    shown = known[:_MAX_SERIES]

    def draw(axes: Axes) -> None:
        _prepare(axes)
        axes.set_ylim(0, 1.18 * highest.nbytes / factor)
        axes.set_xlim(0, max(report.running_seconds, 1.0))
        axes.set_ylabel(unit)
        axes.set_xlabel("seconds that the job ran")
        for index, (process, points, _) in enumerate(shown):
            axes.plot(
                [point.seconds for point in points],
                [point.nbytes / factor for point in points],
                color=_SERIES[index],
                linestyle=_DASHES[index],
                linewidth=2 if process.role == "server" else 1.3,
                marker=_MARKERS[index],
                markersize=3.5,
                markevery=max(1, len(points) // 8),
            )
        _label_ends(axes, [(points[-1].nbytes / factor, process.name) for process, points, _ in shown])
        _mark_peak(axes, highest, report.running_seconds, unit, factor)
        _mark_rounds(axes, report)

    more = f" The table has all {len(known)} processes." if len(known) > len(shown) else ""
    return [
        Chart(
            name=name,
            title=title,
            summary=f"{title} over time, for {len(shown)} processes. The highest peak is "
            f"{format_size(highest.nbytes)} in {shortened(owner.name, 60)}, {highest.seconds:.1f} s after the start."
            + more,
            draw=draw,
            header=("process", "first", "median", "last", "peak", "time of the peak", "round"),
            rows=tuple(
                (
                    printable(process.name),
                    format_size(points[0].nbytes),
                    format_size(int(median(point.nbytes for point in points))),
                    format_size(points[-1].nbytes),
                    format_size(peak.nbytes),
                    f"{peak.seconds:.1f} s",
                    _number(peak.round),
                )
                for process, points, peak in known[:_MAX_ROWS]
            ),
            section="memory",
        )
    ]


def _mark_peak(axes: Axes, peak: Point, end: float, unit: str, factor: float) -> None:
    height = peak.nbytes / factor
    axes.plot(peak.seconds, height, marker="*", markersize=9, color=PALETTE["ink"], clip_on=False, zorder=5)
    side = -1 if peak.seconds > end / 2 else 1
    axes.annotate(
        f"peak {height:.{0 if height >= 100 else 1}f} {unit}",
        (peak.seconds, height),
        textcoords="offset points",
        xytext=(7 * side, 4),
        ha="right" if side < 0 else "left",
        weight="bold",
    )


def _mark_rounds(axes: Axes, report: JobReport) -> None:
    """Mark the ends of rounds above the axes, and the starts that resumed the job."""
    ends = [(each.end, _number(each.number)) for each in report.rounds]
    step = max(1, -(-len(ends) // _MAX_MARKS))
    for index, (seconds, number) in enumerate(ends[step - 1 :: step]):
        axes.axvline(seconds, color=PALETTE["grid"], linewidth=0.8, zorder=0)
        axes.annotate(
            f"round {number}" if index == 0 else number,
            (seconds, 1),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            xytext=(0, 2),
            ha="center",
            fontsize=7.5,
            color=PALETTE["muted"],
        )
    for start in report.starts[1:][-_MAX_MARKS:]:
        axes.axvline(start.seconds, color=PALETTE["c5"], linewidth=1.2, linestyle=":")
        axes.annotate(
            "resumed",
            (start.seconds, 0.03),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            xytext=(-3, 0),
            ha="right",
            va="bottom",
            rotation=90,
            fontsize=7.5,
            color=PALETTE["c5"],
        )


def _durations(rounds: Sequence[Round]) -> Chart:
    parts: tuple[tuple[str, Callable[[Round], float]], ...] = (
        ("waiting for results", lambda round_: round_.waiting_seconds),
        ("aggregation", lambda round_: round_.aggregation_seconds),
        ("other: start, send, save", lambda round_: round_.other_seconds),
    )
    longest = max(rounds, key=lambda round_: round_.seconds)
    rows = tuple(
        (_number(round_.number), *(f"{value(round_):.2f}" for _, value in parts), f"{round_.seconds:.2f}")
        for round_ in rounds[-_MAX_ROWS:]
    )
    mean = sum(round_.seconds for round_ in rounds) / len(rounds)
    return Chart(
        name="durations",
        title="Time of each round",
        summary=f"Stacked bars of the seconds of {len(rounds)} rounds. A round takes {mean:.1f} s on average; the "
        f"longest is round {_number(longest.number)} with {longest.seconds:.1f} s.",
        draw=lambda axes: _bars(axes, rounds, parts, "seconds", _total_seconds),
        header=("round", *(f"{name}, s" for name, _ in parts), "total, s"),
        rows=rows,
        section="rounds",
    )


def _total_seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def _bytes_by_way(rounds: Sequence[Round]) -> Chart:
    ways = sorted({way for round_ in rounds for way in round_.transport})[: len(_HATCHES)]
    unit, factor = _size_unit(max(sum(round_.transport.values()) for round_ in rounds))
    parts = tuple((shortened(way, 40), lambda round_, way=way: round_.transport.get(way, 0) / factor) for way in ways)
    total = sum(sum(round_.transport.values()) for round_ in rounds)
    rows = tuple(
        (_number(round_.number), *(format_size(round_.transport.get(way, 0)) for way in ways))
        for round_ in rounds[-_MAX_ROWS:]
    )
    return Chart(
        name="transport",
        title="Tensors received, by way of transport",
        summary=f"Stacked bars of the bytes that were received in {len(rounds)} rounds, {format_size(total)} in total: "
        f"{', '.join(shortened(way, 40) for way in ways)}.",
        draw=lambda axes: _bars(axes, rounds, parts, unit, lambda value: f"{value:.3g}"),
        header=("round", *(shortened(way, 40) for way in ways)),
        rows=rows,
        section="rounds",
    )


def _bars(
    axes: Axes,
    rounds: Sequence[Round],
    parts: Sequence[tuple[str, Callable[[Round], float]]],
    unit: str,
    total_text: Callable[[float], str],
) -> None:
    _prepare(axes)
    size = -(-len(rounds) // _MAX_BARS)
    bins = [rounds[start : start + size] for start in range(0, len(rounds), size)]
    bottoms = [0.0] * len(bins)
    for index, (name, value) in enumerate(parts):
        heights = [sum(map(value, each)) / len(each) for each in bins]
        _bar(axes.bar, range(len(bins)), heights, index, bottom=bottoms, label=name)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    if len(bins) <= 8:
        for index, total in enumerate(bottoms):
            axes.annotate(
                total_text(total), (index, total), textcoords="offset points", xytext=(0, 2), ha="center", fontsize=8
            )
    step = -(-len(bins) // 10)
    axes.set_xticks(range(0, len(bins), step), [_number(each[0].number) for each in bins[::step]])
    axes.set_xlabel("round" if size == 1 else f"round; each bar is the mean of {size} rounds")
    axes.set_ylabel(unit)
    axes.set_xlim(-0.6, max(len(bins), 3) - 0.4)
    axes.set_ylim(0, 1.12 * (max(bottoms) or 1))
    _legend(axes)


def _client_times(clients: Sequence[Client]) -> Chart:
    ordered = sorted(clients, key=lambda client: -(client.median_seconds or 0))

    def draw(axes: Axes) -> None:
        _prepare(axes)
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x", linewidth=0.6)
        shown = ordered[:_MAX_CLIENTS][::-1]
        for row, client in enumerate(shown):
            values = sorted(client.seconds.values())
            middle = client.median_seconds or 0.0
            color = PALETTE["c2"] if client is ordered[0] and len(ordered) > 1 else PALETTE["c1"]
            axes.plot([values[0], values[-1]], [row, row], color=color, linewidth=1.5, solid_capstyle="butt")
            marks = values[:: -(-len(values) // 20)]
            axes.plot(marks, [row] * len(marks), "|", color=color, markersize=8)
            axes.plot(middle, row, "D", color=color, markersize=5.5)
            axes.annotate(
                _total_seconds(middle),
                (values[-1], row),
                textcoords="offset points",
                xytext=(6, 0),
                va="center",
                fontsize=8,
                weight="bold" if client is ordered[0] else "normal",
            )
        axes.set_yticks(
            range(len(shown)), [shortened(client.name, _MAX_NAME) for client in shown], color=PALETTE["ink"]
        )
        axes.set_ylim(-0.6, max(len(shown), 3) - 0.4)
        axes.set_xlim(0, 1.18 * max(max(client.seconds.values()) for client in shown) or 1)
        axes.set_xlabel("seconds from task to result: median and rounds")

    slowest = ordered[0]
    more = f" The slowest {_MAX_CLIENTS} of {len(ordered)} are drawn." if len(ordered) > _MAX_CLIENTS else ""
    rows = tuple(
        (
            printable(client.name),
            str(len(client.seconds)),
            f"{min(client.seconds.values()):.2f}",
            f"{client.median_seconds or 0:.2f}",
            f"{max(client.seconds.values()):.2f}",
        )
        for client in ordered[:_MAX_ROWS]
    )
    return Chart(
        name="clients",
        title="Time of each client",
        summary="Range and median of the seconds from task to result, slowest client first: "
        f"{shortened(slowest.name, 60)} with a "
        f"median of {slowest.median_seconds or 0:.1f} s.{more}",
        draw=draw,
        header=("client", "rounds", "fastest, s", "median, s", "slowest, s"),
        rows=rows,
        section="clients",
    )


def _client_traffic(clients: Sequence[Client]) -> Chart:
    ordered = sorted(clients, key=lambda client: -sum(client.traffic.values()))
    most = ordered[0]
    unit, factor = _size_unit(sum(most.traffic.values()))
    directions = ("received", "sent")

    def draw(axes: Axes) -> None:
        _prepare(axes)
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x", linewidth=0.6)
        shown = ordered[:_MAX_CLIENTS][::-1]
        lefts = [0.0] * len(shown)
        for index, direction in enumerate(directions):
            widths = [client.traffic.get(direction, 0) / factor for client in shown]
            _bar(axes.barh, range(len(shown)), widths, index, left=lefts, label=direction)
            lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
        for row, total in enumerate(lefts):
            axes.annotate(
                f"{total:.3g} {unit}", (total, row), textcoords="offset points", xytext=(4, 0), va="center", fontsize=8
            )
        axes.set_yticks(
            range(len(shown)), [shortened(client.name, _MAX_NAME) for client in shown], color=PALETTE["ink"]
        )
        axes.set_ylim(-0.6, max(len(shown), 3) - 0.4)
        axes.set_xlim(0, 1.25 * max(lefts))
        axes.set_xlabel(unit)
        _legend(axes)

    return Chart(
        name="traffic",
        title="Tensors that each client received and sent",
        summary=f"Stacked bars of the bytes of {len(ordered)} clients in all rounds. "
        f"{shortened(most.name, 60)} has most: "
        + ", ".join(f"{format_size(nbytes)} {direction}" for direction, nbytes in most.traffic.items())
        + ".",
        draw=draw,
        header=("client", *directions),
        rows=tuple(
            (printable(each.name), *(format_size(each.traffic.get(direction, 0)) for direction in directions))
            for each in ordered[:_MAX_ROWS]
        ),
        section="clients",
    )


def _bar(draw: Callable[..., Any], places: Sequence[int], sizes: Sequence[float], index: int, **more: Any) -> None:
    """Draw bars of one series: the first one filled, the others with hatches."""
    fill = _SERIES[0] if index == 0 else "none"
    draw(places, sizes, 0.72, color=fill, edgecolor=_SERIES[index], hatch=_HATCHES[index], linewidth=1, **more)


def _legend(axes: Axes) -> None:
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0)}
    axes.legend(frameon=False, fontsize=8, ncols=3, handlelength=1.4, columnspacing=1, **place)


def _metric(chart: str, name: str, series: dict[str, dict[int, float]]) -> Chart:
    shown = dict(list(series.items())[:_MAX_SERIES])

    def draw(axes: Axes) -> None:
        _prepare(axes)
        labels = []
        for number, (who, values) in enumerate(shown.items()):
            rounds = sorted(values)
            axes.plot(
                rounds,
                [values[each] for each in rounds],
                color=_SERIES[number],
                linestyle=_DASHES[number],
                marker=_MARKERS[number],
                markersize=4,
                markevery=max(1, len(rounds) // 8),
                linewidth=1.4,
            )
            labels.append((values[rounds[-1]], who))
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("round")
        _label_ends(axes, labels)

    rows = tuple(
        (
            printable(who),
            str(len(values)),
            *(f"{values[each]:.6g}" for each in (min(values), max(values))),
            f"{min(values.values()):.6g}",
            f"{max(values.values()):.6g}",
        )
        for who, values in list(series.items())[:_MAX_ROWS]
    )
    return Chart(
        name=chart,
        title=shortened(name, 60),
        summary=f"Lines by round, for {', '.join(shortened(who, 60) for who in shown)}; {len(series)} in total.",
        draw=draw,
        header=("of", "rounds", "first", "last", "lowest", "highest"),
        rows=rows,
        section="metrics",
    )


def _label_ends(axes: Axes, labels: Sequence[tuple[float, str]]) -> None:
    """Write names right of the axes, at the heights of the last values, but far enough apart to be read."""
    low, high = axes.get_ylim()
    least = 0.09 * (high - low)
    order = sorted(range(len(labels)), key=lambda index: labels[index])
    heights = [labels[index][0] for index in order]
    for place in range(1, len(heights)):
        heights[place] = max(heights[place], heights[place - 1] + least)
    for place in reversed(range(len(heights))):
        heights[place] = min(heights[place], high - least * (len(heights) - 1 - place))
    for index, height in zip(order, heights, strict=True):
        axes.annotate(
            f"{_MARKS[index]} {shortened(labels[index][1], 18)}",
            (1, height),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            xytext=(5, 0),
            va="center",
            color=_SERIES[index],
            fontsize=8,
            annotation_clip=False,
        )


def _size_unit(nbytes: float) -> tuple[str, float]:
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return unit, 1024.0**power
    return "bytes", 1.0


def _number(number: int | None) -> str:
    return "none" if number is None else str(number)
