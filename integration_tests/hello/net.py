# SPDX-License-Identifier: Apache-2.0
"""A small classifier with a normalization layer, for jobs that really learn."""

from __future__ import annotations

import torch


class Net(torch.nn.Module):
    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.hidden = hidden
        generator = torch.Generator().manual_seed(7)
        self.first = torch.nn.Linear(8, hidden)
        self.norm = torch.nn.BatchNorm1d(hidden)
        self.last = torch.nn.Linear(hidden, 3)
        with torch.no_grad():
            for parameter in (*self.first.parameters(), *self.last.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def data(seed: int, count: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points around three centers, and which center each belongs to."""
    centers = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)) * 2
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return centers[labels] + torch.randn(count, 8, generator=generator), labels
