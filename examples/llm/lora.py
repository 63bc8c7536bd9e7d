# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA): a frozen model learns by small matrices beside its large ones, and only they travel."""

from __future__ import annotations

import torch


class AdaptedLinear(torch.nn.Module):
    """A frozen linear layer and the adapter beside it, which adds nothing at first."""

    def __init__(self, base: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = torch.nn.Parameter(torch.empty(rank, base.in_features, dtype=base.weight.dtype))
        self.lora_b = torch.nn.Parameter(torch.zeros(base.out_features, rank, dtype=base.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


def adapt(model: torch.nn.Module, rank: int = 8, seed: int = 0) -> None:
    """Freeze a model and put an adapter beside each of its linear layers."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parent in [*model.modules()]:
        for name, layer in [*parent.named_children()]:
            if isinstance(layer, torch.nn.Linear):
                adapted = AdaptedLinear(layer, rank)
                torch.nn.init.normal_(adapted.lora_a, std=layer.in_features**-0.5, generator=generator)
                setattr(parent, name, adapted)


def adapters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of the adapters by name."""
    return {name: weight.detach() for name, weight in model.named_parameters() if "lora_" in name}
