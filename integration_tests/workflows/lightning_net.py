# SPDX-License-Identifier: Apache-2.0
"""The small classifier as a Lightning module."""

from __future__ import annotations

import pytorch_lightning as pl
import torch
from net import Net


class LightningNet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_index):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_index):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)
