# SPDX-License-Identifier: Apache-2.0
"""The model that the sites train together, and how well it does."""

from __future__ import annotations

import torch


class MoonNet(torch.nn.Sequential):
    """A small perceptron that tells on which moon a point is."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(
            torch.nn.Linear(2, width),
            torch.nn.Tanh(),
            torch.nn.Linear(width, width),
            torch.nn.Tanh(),
            torch.nn.Linear(width, 2),
        )


@torch.no_grad()
def accuracy(model: torch.nn.Module, points: torch.Tensor, which: torch.Tensor) -> float:
    """Return the share of points that the model gets right."""
    return (model(points).argmax(dim=1) == which).float().mean().item()
