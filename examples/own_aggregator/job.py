# SPDX-License-Identifier: Apache-2.0
"""An NVFlare job with a custom aggregator, without and with one more component on the server."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from blobs import points
from median_aggregator import MedianAggregator
from model import WideNet, accuracy
from nvflare.app_opt.pt.recipes import FedAvgRecipe
from nvflare.client.config import ExchangeFormat
from nvflare.recipe.sim_env import SimEnv

from benchmarks.fl_job import MIB, Sampler
from benchmarks.fl_job.simulator import simulator_roles
from nvflare_lazy.recipes import make_lazy

HERE = Path(__file__).parent
SITES = 3
ENOUGH = 0.9


def run(name: str, options: argparse.Namespace, initial: Path, *, offload: bool) -> tuple[Path, int]:
    """Run the job; returns the server's run directory and the most memory its process had, in bytes."""
    recipe = FedAvgRecipe(
        name=name,
        model=WideNet(options.width, options.layers),
        initial_ckpt=str(initial),
        min_clients=SITES,
        num_rounds=options.rounds,
        train_script=str(HERE / "client.py"),
        train_args=f"--width {options.width} --layers {options.layers}",
        aggregator=MedianAggregator(),
        server_expected_format=ExchangeFormat.PYTORCH,
    )
    if offload:
        make_lazy(recipe, level=1)
    with Sampler(lambda: simulator_roles(os.getpid())) as watched:
        result = recipe.execute(SimEnv(num_clients=SITES, workspace_root=options.workspace)).get_result()
    peak = max(sample.anon for sample in watched.samples if sample.role == "server")
    return Path(result) / "server" / "simulate_job", peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workspace", default="/tmp/nvflare/simulation")
    options = parser.parse_args()
    workspace = Path(options.workspace)
    workspace.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    model = WideNet(options.width, options.layers)
    size = sum(value.nbytes for value in model.state_dict().values())
    test = points(2000, seed=0)
    before = accuracy(model, *test)
    initial = workspace / "wide_net.pt"
    torch.save(model.state_dict(), initial)

    plain, plain_peak = run("median", options, initial, offload=False)
    lazy, lazy_peak = run("median_offloaded", options, initial, offload=True)

    weights = torch.load(plain / "app_server" / "FL_global_model.pt")["model"]
    same = torch.load(lazy / "app_server" / "FL_global_model.pt")["model"]
    equal = all(torch.equal(weights[name], same[name]) for name in weights)
    records = [json.loads(line) for line in (lazy / "nvflare_lazy.jsonl").read_text().splitlines()]
    on_disk = [record["on_disk"] for record in records if record["kind"] == "contribution"]
    model.load_state_dict(same)
    after = accuracy(model, *test)

    print(f"\na model of {size / MIB:.0f} MiB, {SITES} clients, {options.rounds} rounds, MedianAggregator")
    print(f"accuracy: {before:.3f} before, {after:.3f} after")
    print(f"the same model with and without TensorOffload, to the bit: {'yes' if equal else 'NO'}")
    print(f"results on disk when the aggregator had them: {sum(on_disk)} of {len(on_disk)}")
    print(f"server memory at most: {plain_peak / MIB:.0f} MiB without, {lazy_peak / MIB:.0f} MiB with TensorOffload")
    return 0 if equal and all(on_disk) and len(on_disk) == SITES * options.rounds and after > ENOUGH else 1


if __name__ == "__main__":
    raise SystemExit(main())
