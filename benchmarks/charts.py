# SPDX-License-Identifier: Apache-2.0
"""Pictures of measured runs. Each can be read alone: what ran, on what axis, in what unit, and the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.fl_job import MIB

mpl.use("Agg")

NAMES = {
    "stock": "NVFlare, in memory",
    "offload": "NVFlare, its own disk offload",
    "level-1": "nvflare-lazy, level 1",
    "level-2": "nvflare-lazy, level 2",
    "level-3": "nvflare-lazy, level 3",
    "level-3-apart": "nvflare-lazy, level 3, server apart",
}
# Also distinct in grey, and for color-blind readers.
COLORS = {
    "stock": "#b2182b",
    "offload": "#ef8a62",
    "level-1": "#92c5de",
    "level-2": "#4393c3",
    "level-3": "#053061",
    "level-3-apart": "#5e3c99",
}
MARKERS = {"stock": "o", "offload": "s", "level-1": "v", "level-2": "D", "level-3": "^", "level-3-apart": "P"}

#: Median, lowest and highest value.
Spread = tuple[float, float, float]

GIB = 1024 * MIB


def timeline(runs: Mapping[str, tuple[Sequence[tuple[float, int]], int]], path: Path, title: str) -> None:
    """Draw the server's anonymous memory over time: for each mode its samples (seconds, bytes) and its peak."""
    figure, axes = _figure(title)
    for mode, (samples, peak) in runs.items():
        axes.plot(
            [seconds for seconds, _ in samples],
            [anon / GIB for _, anon in samples],
            color=COLORS[mode],
            linewidth=1.8,
            label=f"{NAMES[mode]}: peak {peak / GIB:.2f} GiB",
        )
    axes.set_xlabel("seconds since the job was started (one run of each)")
    axes.set_ylabel("server process, anonymous memory in GiB")
    _finish(figure, axes, path)


def peaks(rows: Mapping[str, Mapping[float, Spread]], path: Path, title: str, axis: str) -> None:
    """Draw peak server memory (bytes: median, lowest, highest) against a number."""
    figure, axes = _figure(title)
    ends = {mode: points[max(points)][0] / GIB for mode, points in rows.items()}
    heights = _apart(ends, 0.045 * max(ends.values()))
    for mode, points in rows.items():
        xs = sorted(points)
        middle = [points[x][0] / GIB for x in xs]
        low = [m - points[x][1] / GIB for m, x in zip(middle, xs, strict=True)]
        high = [points[x][2] / GIB - m for m, x in zip(middle, xs, strict=True)]
        axes.errorbar(
            xs, middle, yerr=[low, high], color=COLORS[mode], marker=MARKERS[mode], capsize=3, label=NAMES[mode]
        )
        axes.annotate(
            f"{middle[-1]:.2f}", (xs[-1], heights[mode]), textcoords="offset points", xytext=(8, 0), color=COLORS[mode]
        )
    axes.set_xlabel(axis)
    axes.set_ylabel("server process, peak anonymous memory in GiB")
    ticks = sorted({x for points in rows.values() for x in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    _finish(figure, axes, path)


def _apart(ends: Mapping[str, float], least: float) -> dict[str, float]:
    """Return a height for the number at the end of each line, none closer to the next than it takes to read both."""
    heights: dict[str, float] = {}
    height = -least
    for mode in sorted(ends, key=lambda mode: ends[mode]):
        heights[mode] = height = max(ends[mode], height + least)
    return heights


def bars(rows: Mapping[str, Spread], path: Path, title: str, axis: str) -> None:
    """Draw a number for each mode: median, lowest, highest."""
    figure, axes = _figure(title)
    for place, (mode, (middle, low, high)) in enumerate(rows.items()):
        axes.bar(place, middle, color=COLORS[mode], width=0.6)
        axes.errorbar(place, middle, yerr=[[middle - low], [high - middle]], color="black", capsize=4)
        axes.annotate(f"{middle:.1f}", (place, middle), textcoords="offset points", xytext=(8, 6))
    axes.set_xticks(range(len(rows)), [NAMES[mode].replace(", ", ",\n") for mode in rows])
    axes.set_ylabel(f"{axis}: median and range of the runs")
    _finish(figure, axes, path, legend=False)


def _figure(title: str) -> tuple[plt.Figure, plt.Axes]:
    figure, axes = plt.subplots(figsize=(9, 5), dpi=130)
    axes.set_title(title, loc="left", fontsize=11)
    return figure, axes


def _finish(figure: plt.Figure, axes: plt.Axes, path: Path, *, legend: bool = True) -> None:
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
