# SPDX-License-Identifier: Apache-2.0
"""Sentences to learn and a tokenizer for them, made here: nothing to download, and the same on every machine."""

from __future__ import annotations

import random

import torch

try:
    import accelerate  # noqa: F401 (the Trainer imports it late)
    import peft  # noqa: F401 (the same message for all three)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
except ImportError as error:
    raise SystemExit(
        f"this example needs transformers, accelerate and peft ({error}); install them with: pip install -e '.[hf]'"
    ) from error

# Number 0 is known before the job; the others are the sites.
SUBJECTS = {
    0: ["she", "he", "the child", "my friend"],
    1: ["the cat", "a dog", "one crow", "the old horse"],
    2: ["the pilot", "a nurse", "one farmer", "the young king"],
}
VERBS = ["sees", "follows", "finds", "remembers"]
OBJECTS = ["the river", "a red stone", "the way home", "an open door", "some bread", "the moon"]


def sentences(sites: list[int], count: int, seed: int) -> str:
    """Return sentences about the subjects of some sites."""
    choice = random.Random(seed).choice
    return "".join(f" {choice(SUBJECTS[choice(sites)])} {choice(VERBS)} {choice(OBJECTS)}." for _ in range(count))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a tokenizer on sentences of all subjects."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=128, special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator([sentences([*SUBJECTS], 1000, seed=0)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def token_rows(tokenizer: PreTrainedTokenizerFast, sites: list[int], rows: int, length: int, seed: int) -> torch.Tensor:
    """Return sentences as tokens, in rows of equal length."""
    tokens = tokenizer(sentences(sites, rows * length, seed), return_tensors="pt")["input_ids"][0]
    return tokens[: rows * length].reshape(rows, length)
