# SPDX-License-Identifier: Apache-2.0
"""A model that is nothing but its size: T equal tensors, the same values on every machine and in every run.

This file travels in the job's `custom` folder, so it may import nothing of this package.
"""

from __future__ import annotations

import torch


class SyntheticModel(torch.nn.Module):
    """`tensors` parameters of `elements` each, in `dtype`."""

    def __init__(self, tensors: int = 4, elements: int = 1024, dtype: str = "float32") -> None:
        super().__init__()
        for index in range(tensors):
            values = initial_values(index, elements).to(getattr(torch, dtype))
            self.register_parameter(f"layer{index:05d}", torch.nn.Parameter(values, requires_grad=False))


def initial_values(index: int, elements: int) -> torch.Tensor:
    """Return the float32 values tensor `index` starts with: small, different from each other, not exact in binary."""
    values = torch.arange(elements, dtype=torch.float32)
    return values.remainder_(1009).mul_(1e-3).add_(0.1 * (index % 7))


def step(value: torch.Tensor, site: int) -> torch.Tensor:
    """Return a client's update of a tensor in a round: cheap, different at every site, repeatable to the bit."""
    return value.mul(1 + site / 128).add_(site * 1e-3)
