# SPDX-License-Identifier: Apache-2.0
"""A language model of a few tensors, with the names of a Hugging Face model and tied embeddings."""

from __future__ import annotations

import torch

WORDS, WIDTH = 32, 16


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.ModuleDict(
            {"embed_tokens": torch.nn.Embedding(WORDS, WIDTH), "layers": torch.nn.Linear(WIDTH, WIDTH)}
        )
        self.lm_head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.model["embed_tokens"].weight

    def loss(self) -> torch.Tensor:
        """Each word is followed by the next one."""
        words = torch.arange(WORDS)
        hidden = torch.tanh(self.model["layers"](self.model["embed_tokens"](words)))
        return torch.nn.functional.cross_entropy(self.lm_head(hidden), (words + 1) % WORDS)
