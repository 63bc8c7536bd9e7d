# SPDX-License-Identifier: Apache-2.0
"""Text with something to learn in it, made here: nothing to download, and the same text on every machine."""

from __future__ import annotations

import random

import torch

WHO = {
    1: ["the cat", "a dog", "one crow", "the old horse"],
    2: ["the pilot", "a nurse", "one farmer", "the young king"],
}
DOES = ["sees", "follows", "finds", "remembers"]
WHAT = ["the river", "a red stone", "the way home", "an open door", "some bread", "the moon"]


def text(sites: list[int], sequences: int, length: int, seed: int) -> torch.Tensor:
    """Return text as tokens, one for each character, in rows of `length`."""
    choice = random.Random(seed).choice
    characters = ""
    while len(characters) < sequences * length:
        characters += f"{choice(WHO[choice(sites)])} {choice(DOES)} {choice(WHAT)}. "
    return torch.tensor([*characters.encode()][: sequences * length]).reshape(sequences, length)
