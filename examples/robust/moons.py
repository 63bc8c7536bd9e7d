# SPDX-License-Identifier: Apache-2.0
"""Two half moons: nothing to download, and the same ones on every machine."""

from __future__ import annotations

import math

import torch


def moons(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points in the plane, (count, 2), and on which of the two moons each of them is."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(2, (count,), generator=generator)
    angle = torch.rand(count, generator=generator) * math.pi
    upper = torch.stack([angle.cos(), angle.sin()], dim=1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], dim=1)
    points = torch.where(which[:, None] == 0, upper, lower)
    return points + torch.randn(count, 2, generator=generator) * 0.12, which
