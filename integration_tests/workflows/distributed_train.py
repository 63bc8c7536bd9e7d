# SPDX-License-Identifier: Apache-2.0
"""A trainer of several ranks under `torchrun`: the first one talks to NVFlare, the others get the model from it."""

from __future__ import annotations

import nvflare.client as flare
import torch
import torch.distributed as dist
from net import Net, data
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    flare.init(rank=str(rank))
    model = Net()
    while True:
        running = [flare.is_running() if rank == 0 else None]
        dist.broadcast_object_list(running, src=0)
        if not running[0]:
            break
        received = flare.receive()
        if rank == 0:
            print(f"rank 0 received {type(received.params['first.weight']).__name__}", flush=True)
            model.load_state_dict(received.params)
        distributed = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x, y = data(rank)
        for batch in range(4):
            part = slice(batch * 64, batch * 64 + 64)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(distributed(x[part]), y[part]).backward()
            optimizer.step()
        if rank == 0:
            flare.send(flare.FLModel(params=model.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": 4}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
