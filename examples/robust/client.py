# SPDX-License-Identifier: Apache-2.0
"""What every site runs; with `--poisoned`, the site undoes what the others learn, ten times over."""

from __future__ import annotations

import argparse

import nvflare.client as flare
import torch
import torch.nn.functional as F
from model import MoonNet
from moons import moons

EPOCHS = 5
BOOST = 10


def train(model: torch.nn.Module, points: torch.Tensor, which: torch.Tensor, seed: int) -> int:
    """Train, and return the number of steps it took."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    steps = 0
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(which), generator=generator).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(points[batch]), which[batch]).backward()
            optimizer.step()
            steps += 1
    return steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--poisoned", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    flare.init()
    site = int(flare.get_site_name().rsplit("-", 1)[-1])
    points, which = moons(400, seed=site)
    model = MoonNet()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        model.load_state_dict(received.params)
        steps = train(model, points, which, seed=received.current_round)
        params = model.state_dict()
        if options.poisoned:
            before = received.params
            params = {name: before[name] - BOOST * (value - before[name]) for name, value in params.items()}
        flare.send(flare.FLModel(params=params, meta={"NUM_STEPS_CURRENT_ROUND": steps}))


if __name__ == "__main__":
    main()
