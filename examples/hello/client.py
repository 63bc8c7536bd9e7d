# SPDX-License-Identifier: Apache-2.0
"""What every site runs: an ordinary training loop between NVFlare's `receive` and `send`."""

from __future__ import annotations

import nvflare.client as flare
import torch
import torch.nn.functional as F
from digits import SITE_SHARES, draw
from model import DigitNet, evaluate

EPOCHS = 2
BATCH = 32


def train(model: torch.nn.Module, pictures: torch.Tensor, labels: torch.Tensor, seed: int) -> int:
    """Train, and return the number of steps it took."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    steps = 0
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels), generator=generator).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(pictures[batch]), labels[batch]).backward()
            optimizer.step()
            steps += 1
    return steps


def main() -> None:
    # The sites share this machine.
    torch.set_num_threads(1)
    flare.init()
    site = int(flare.get_site_name().rsplit("-", 1)[-1])
    pictures, labels = draw(2000, SITE_SHARES[site], seed=site)
    model = DigitNet()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        model.load_state_dict(received.params)
        loss, accuracy = evaluate(model, pictures, labels)
        steps = train(model, pictures, labels, seed=received.current_round)
        flare.send(
            flare.FLModel(
                params=model.state_dict(),
                metrics={"accuracy": accuracy, "loss": loss},
                meta={"NUM_STEPS_CURRENT_ROUND": steps},
            )
        )


if __name__ == "__main__":
    main()
