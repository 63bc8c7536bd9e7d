# SPDX-License-Identifier: Apache-2.0
"""What every site runs, in a process of its own: fine-tunes the whole decoder, or only adapters beside it."""

from __future__ import annotations

import argparse

import nvflare.client as flare
import torch
from corpus import text
from lora import adapt, adapters
from model import Decoder

import nvflare_lazy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size")
    parser.add_argument("--base", help="the checkpoint that adapters are trained beside")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    options = parser.parse_args()
    # The sites share this machine.
    torch.set_num_threads(1)
    if not options.stock:
        # Before `init`: tensors come and go in pieces, and those that come are on disk.
        nvflare_lazy.install()
    flare.init()
    site = int(flare.get_site_name().rsplit("-", 1)[-1])

    model = Decoder(options.size)
    if options.lora:
        model.load_state_dict(nvflare_lazy.open(options.base))
        adapt(model)
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        # One tensor after the other: there is no second model in memory.
        model.load_state_dict(received.params, strict=not options.lora)
        seed = 100 * received.current_round + site
        del received
        data = text([site], options.steps * options.batch, options.length, seed)
        optimizer = torch.optim.AdamW(learned, lr=3e-3 if options.lora else 1e-3)
        for batch in data.split(options.batch):
            optimizer.zero_grad()
            loss = model.loss(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
        # Moments and gradients are as large as the model, and not needed while it is sent.
        del optimizer
        model.zero_grad()
        flare.send(
            flare.FLModel(
                params=adapters(model) if options.lora else model.state_dict(),
                metrics={"loss": loss.item()},
                meta={"NUM_STEPS_CURRENT_ROUND": options.steps},
            )
        )


if __name__ == "__main__":
    main()
