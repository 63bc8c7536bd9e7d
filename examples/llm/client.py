# SPDX-License-Identifier: Apache-2.0
"""The training script of a site: fine-tunes the whole model, or an adapter, with transformers' Trainer."""

from __future__ import annotations

import argparse
import tempfile

import nvflare.client.hf as flare
import torch
from corpus import token_rows
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import nvflare_lazy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base")
    parser.add_argument("--adapter")
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    options = parser.parse_args()
    # The sites share this machine.
    torch.set_num_threads(1)
    if not options.stock:
        # Before `init`, so that this process receives the global model on disk.
        nvflare_lazy.install()
    flare.init()
    site = int(flare.get_site_name().rsplit("-", 1)[-1])

    tokenizer = AutoTokenizer.from_pretrained(options.base)
    model = AutoModelForCausalLM.from_pretrained(options.base, dtype="auto")
    if options.adapter:
        model = PeftModel.from_pretrained(model, options.adapter, is_trainable=True)
    rows = token_rows(tokenizer, [site], options.steps * options.batch, options.length, seed=site)
    held_out = token_rows(tokenizer, [site], options.batch, options.length, seed=100 + site)
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            model,
            TrainingArguments(
                directory,
                per_device_train_batch_size=options.batch,
                learning_rate=1e-2 if options.adapter else 1e-3,
                lr_scheduler_type="constant",
                logging_steps=options.steps,
                # A checkpoint of the Trainer is the model and two moments: three times its size for each site.
                save_strategy="no",
                use_cpu=True,
                disable_tqdm=True,
                report_to=[],
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            eval_dataset=[{"input_ids": row, "labels": row} for row in held_out],
        )
        flare.patch(trainer, local_steps=options.steps, restore_state=False)
        while flare.is_running():
            trainer.evaluate()  # the loss of the global model selects the best one
            trainer.train()


if __name__ == "__main__":
    main()
