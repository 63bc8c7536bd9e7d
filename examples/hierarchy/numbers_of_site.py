# SPDX-License-Identifier: Apache-2.0
"""The tree, and the steps and results of its leaves; `run.py` computes the flat mean of the same numbers."""

from __future__ import annotations

import zlib

import torch

# The sites 1 and 2 are in the middle: site 1 is above 3 and 4, and site 2 is above 5.
PARENTS = {"site-3": "site-1", "site-4": "site-1", "site-5": "site-2"}
STEPS = {"site-3": 100, "site-4": 7, "site-5": 1000}


def changed(site: str, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with random numbers added, which depend on the site and the name."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{site} {name}".encode()))
    return value + torch.randn(value.shape, generator=generator)
