# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face directories that a job starts from: a model made from a config, and a LoRA adapter for it."""

from __future__ import annotations

from pathlib import Path

import torch
from corpus import make_tokenizer, token_rows
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

SIZES = {
    "tiny": {
        "vocab_size": 128,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    # The shape of SmolLM2-360M.
    "360m": {
        "vocab_size": 49152,
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
    },
}
# A large model starts untrained: this would take too long without a GPU.
PRETRAINING_STEPS = {"tiny": 60, "360m": 0}


def make_base(size: str, path: Path) -> None:
    """Write a model with tied embeddings, its configuration and its tokenizer."""
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        **SIZES[size],
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(PRETRAINING_STEPS[size]):
        rows = token_rows(tokenizer, [0], 8, 64, seed=step)
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def make_adapter(base: Path, path: Path) -> None:
    """Write an untrained LoRA adapter for a model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(path)


def stock_model(path: str) -> torch.nn.Module:
    """Return the model as NVFlare's persistor needs it: in the memory of the server."""
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto")
