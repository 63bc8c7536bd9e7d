# SPDX-License-Identifier: Apache-2.0
"""A client of Lightning, whose patched trainer receives and sends the model, with metrics for experiment tracking."""

from __future__ import annotations

import nvflare.client.lightning as flare
import pytorch_lightning as pl
import torch
from lightning_net import LightningNet
from net import data
from nvflare.client.tracking import SummaryWriter
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(7)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    flare.patch(trainer)
    writer = SummaryWriter()
    site = int(flare.get_site_name().rsplit("-", 1)[-1])
    loader = DataLoader(TensorDataset(*data(site)), batch_size=64)
    model = LightningNet()
    while flare.is_running():
        received = flare.receive()
        print(f"received {type(next(iter(received.params.values()))).__name__}")
        trainer.validate(model, DataLoader(TensorDataset(*data(999)), batch_size=512), verbose=False)
        writer.add_scalar("accuracy", float(trainer.callback_metrics["accuracy"]), received.current_round)
        trainer.fit(model, loader)


if __name__ == "__main__":
    main()
