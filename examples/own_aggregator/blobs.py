# SPDX-License-Identifier: Apache-2.0
"""Points in clouds around a few centres: nothing to download, and the same ones on every machine."""

from __future__ import annotations

import torch

FEATURES = 64
CLOUDS = 8


def points(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points, and the number of the cloud each of them is from."""
    centres = torch.randn(CLOUDS, FEATURES, generator=torch.Generator().manual_seed(0)) * 0.5
    generator = torch.Generator().manual_seed(seed)
    clouds = torch.randint(CLOUDS, (count,), generator=generator)
    return centres[clouds] + torch.randn(count, FEATURES, generator=generator), clouds
