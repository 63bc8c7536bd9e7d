# SPDX-License-Identifier: Apache-2.0
"""A network with more weights than its task needs, so that it shows where they are kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from blobs import CLOUDS, FEATURES


class WideNet(torch.nn.Module):
    """Residual blocks, as many as `layers`, of one square weight of `width` each."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.width, self.layers = width, layers
        self.first = torch.nn.Linear(FEATURES, width)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        self.last = torch.nn.Linear(width, CLOUDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.first(x)
        for block in self.blocks:
            state = state + F.relu(block(state)) / self.layers
        return self.last(state)


@torch.no_grad()
def accuracy(model: torch.nn.Module, x: torch.Tensor, clouds: torch.Tensor) -> float:
    """Return the share of points whose cloud the model finds."""
    return (model(x).argmax(dim=1) == clouds).float().mean().item()
