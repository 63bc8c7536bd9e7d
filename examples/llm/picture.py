# SPDX-License-Identifier: Apache-2.0
"""The chart: memory of the server and the larger trainer during the job, and the loss after each round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.fl_job import MIB, Sample

mpl.use("Agg")

# Distinct for the color-blind, and in grey.
COLORS = {"server": "#b2182b", "trainer": "#2166ac"}


def draw(samples: Sequence[Sample], losses: Sequence[float], title: str, path: Path) -> None:
    """Write the chart to a file."""
    figure, (memory, loss) = plt.subplots(1, 2, figsize=(10, 3.6), dpi=110, width_ratios=(2, 1))
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    for role, color in COLORS.items():
        largest: dict[float, float] = {}
        for sample in samples:
            if sample.role == role:
                largest[sample.seconds] = max(sample.anon / MIB, largest.get(sample.seconds, 0))
        memory.plot([*largest], [*largest.values()], color=color, label=role)
    memory.set_title("memory of the server and of the larger trainer", fontsize=11)
    memory.set_xlabel("seconds")
    memory.set_ylabel("MiB")
    memory.legend(frameon=False)
    loss.plot(range(len(losses)), losses, color="#404040", marker="o")
    loss.set_title("held-out loss", fontsize=11)
    loss.set_xlabel("rounds of training")
    loss.set_xticks(range(len(losses)))
    for panel in (memory, loss):
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
