# SPDX-License-Identifier: Apache-2.0
"""What every site runs: an ordinary training loop between NVFlare's `receive` and `send`."""

from __future__ import annotations

import argparse

import nvflare.client as flare
import torch
import torch.nn.functional as F
from blobs import points
from model import WideNet


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int)
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    # The sites share this machine, and one thread adds up in the same order every time.
    torch.set_num_threads(1)
    flare.init()
    site = int(flare.get_site_name().rsplit("-", 1)[-1])
    x, clouds = points(512, seed=site)
    model = WideNet(options.width, options.layers)
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        model.load_state_dict(received.params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        batches = torch.arange(len(clouds)).split(32)
        for batch in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), clouds[batch]).backward()
            optimizer.step()
        flare.send(flare.FLModel(params=model.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": len(batches)}))


if __name__ == "__main__":
    main()
