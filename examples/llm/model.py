# SPDX-License-Identifier: Apache-2.0
"""A decoder as language models are today: RMSNorm, rotary positions, grouped queries, SwiGLU, a tied head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Shape:
    """How large it is."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int


SIZES = {
    "tiny": Shape(vocabulary=256, width=96, layers=2, heads=6, kv_heads=2, hidden=256),
    # The shape of SmolLM2-360M.
    "360m": Shape(vocabulary=49152, width=960, layers=32, heads=15, kv_heads=5, hidden=2560),
}


class RMSNorm(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, eps=1e-5)


class Attention(torch.nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        kv_width = shape.kv_heads * self.head_width
        self.q_proj = torch.nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = torch.nn.Linear(shape.width, kv_width, bias=False)
        self.v_proj = torch.nn.Linear(shape.width, kv_width, bias=False)
        self.o_proj = torch.nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_width)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, rotation), rotate(k, rotation)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(seen.transpose(1, 2).flatten(2))


class MLP(torch.nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = torch.nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = torch.nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(torch.nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.width)
        self.mlp = MLP(shape)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(torch.nn.Module):
    """The model, in bfloat16.

    Args:
        size: One of `SIZES`.
        device: "meta" makes one without memory for its weights.
    """

    def __init__(self, size: str = "tiny", device: str = "cpu") -> None:
        super().__init__()
        self.size = size
        shape = SIZES[size]
        with torch.device("meta"):
            self.embed_tokens = torch.nn.Embedding(shape.vocabulary, shape.width)
            self.layers = torch.nn.ModuleList(Layer(shape) for _ in range(shape.layers))
            self.norm = RMSNorm(shape.width)
        self.to(torch.bfloat16)
        if device != "meta":
            self.to_empty(device=device)
            self.reset(seed=0)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Set random weights: the same ones on every machine."""
        generator = torch.Generator().manual_seed(seed)
        for weight in self.parameters():
            if weight.dim() == 1:
                weight.fill_(1)
            else:
                weight.normal_(std=0.02, generator=generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        rotation = rotations(tokens.shape[1], self.layers[0].self_attn.head_width)
        for layer in self.layers:
            x = layer(x, rotation)
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        """Return how badly each token of a text is foreseen from those before it."""
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())


def rotations(length: int, head_width: int) -> torch.Tensor:
    """Return e^(i position frequency) for every position and every pair of a head's elements."""
    frequency = 10000 ** (-torch.arange(0, head_width, 2) / head_width)
    angle = torch.outer(torch.arange(length), frequency)
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn each pair of elements, (batch, position, head, element), by what its position says."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation[:, None]).flatten(-2).to(x.dtype)
