# SPDX-License-Identifier: Apache-2.0
"""The chart: the predictions of the model with each rule, and their accuracy by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch

mpl.use("Agg")

# Distinct for color-blind readers and in gray.
SIDES = ("#f4a582", "#92c5de")
POINTS = ("#b2182b", "#2166ac")
CURVES = {"mean": ("#b2182b", "s"), "trimmed_mean": ("#2166ac", "o")}


def draw(
    models: Mapping[str, torch.nn.Module],
    curves: Mapping[str, Sequence[float]],
    test: tuple[torch.Tensor, torch.Tensor],
    title: str,
    path: Path,
) -> None:
    """Draw the plane as each model divides it, and the accuracy round by round."""
    figure, axes = plt.subplots(1, len(models) + 1, figsize=(13, 4.2), dpi=110)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    for panel, (name, model) in zip(axes, models.items(), strict=False):
        divide(panel, model, *test)
        panel.set_title(f"{name}: accuracy {curves[name][-1]:.2f}", fontsize=11)
    last = axes[-1]
    for name, values in curves.items():
        colour, marker = CURVES[name]
        last.plot(range(len(values)), values, color=colour, marker=marker, label=name)
    last.set_title("accuracy of the global model", fontsize=11)
    last.set_xlabel("rounds of training")
    last.set_xticks(range(len(values)))
    last.set_ylim(0, 1.03)
    last.grid(alpha=0.3)
    last.legend(frameon=False, loc="center right")
    last.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


@torch.no_grad()
def divide(panel: plt.Axes, model: torch.nn.Module, points: torch.Tensor, which: torch.Tensor) -> None:
    """Color the plane by the predictions of a model, with the test points."""
    x, y = torch.linspace(-1.6, 2.6, 300), torch.linspace(-1.1, 1.6, 200)
    plane = torch.cartesian_prod(x, y)
    says = model(plane).argmax(dim=1).reshape(len(x), len(y)).T
    panel.contourf(x, y, says, levels=[-0.5, 0.5, 1.5], colors=SIDES)
    for side, (colour, marker) in enumerate(zip(POINTS, "o^", strict=True)):
        shown = points[which == side][:150]
        panel.scatter(shown[:, 0], shown[:, 1], s=9, color=colour, marker=marker)
    panel.set_xticks([])
    panel.set_yticks([])
