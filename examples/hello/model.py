# SPDX-License-Identifier: Apache-2.0
"""The model that the sites train together, and how well it does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from digits import SIZE


class DigitNet(torch.nn.Module):
    """A small convolutional network for pictures of digits."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.channels = channels
        self.first = torch.nn.Conv2d(1, channels, 3, padding=1)
        self.second = torch.nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.hidden = torch.nn.Linear(2 * channels * (SIZE // 4) ** 2, 64)
        self.digit = torch.nn.Linear(64, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        seen = F.max_pool2d(F.relu(self.first(pictures)), 2)
        seen = F.max_pool2d(F.relu(self.second(seen)), 2)
        return self.digit(F.relu(self.hidden(seen.flatten(1))))


@torch.no_grad()
def evaluate(model: torch.nn.Module, pictures: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Return the loss and the accuracy."""
    answers = model(pictures)
    return F.cross_entropy(answers, labels).item(), (answers.argmax(dim=1) == labels).float().mean().item()
