# SPDX-License-Identifier: Apache-2.0
"""A Trainer with NVFlare's client for Hugging Face, for a model or an adapter; learning rate 0 changes nothing."""

from __future__ import annotations

import argparse
import tempfile

import nvflare.client.hf as flare
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", required=True)
    parser.add_argument("--adapter")
    parser.add_argument("--prefix")
    parser.add_argument("--lr", type=float, default=0.0)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.base)
    if options.adapter:
        model = PeftModel.from_pretrained(model, options.adapter, is_trainable=True)
    with torch.no_grad():
        # What counts is what the server sends.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    row = torch.arange(6)
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            model,
            TrainingArguments(
                directory,
                max_steps=1,
                learning_rate=options.lr,
                weight_decay=0.0,
                report_to=[],
                use_cpu=True,
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": row, "labels": row}] * 8,
        )
        flare.patch(trainer, restore_state=False, server_key_prefix=options.prefix, local_steps=1)
        while flare.is_running():
            trainer.train()


if __name__ == "__main__":
    main()
