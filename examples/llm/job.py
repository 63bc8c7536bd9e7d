# SPDX-License-Identifier: Apache-2.0
"""Sites fine-tune a decoder in bfloat16, the whole of it or adapters beside it, each in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import torch
from corpus import text
from lora import adapt, adapters
from model import SIZES, Decoder
from nvflare.app_opt.pt.recipes import FedAvgRecipe as StockFedAvgRecipe
from nvflare.client.config import ExchangeFormat
from nvflare.recipe.poc_env import PocEnv
from nvflare.recipe.sim_env import SimEnv

import nvflare_lazy
from benchmarks.fl_job import MIB, Sampler
from benchmarks.fl_job.sampling import descendants
from nvflare_lazy.recipes import FedAvgRecipe

HERE = Path(__file__).parent
SITES = 2
# Steps a round, texts a step, characters a text: what a core does in less than half a minute.
TRAINING = {"tiny": (20, 8, 128), "360m": (4, 2, 64)}


def main() -> int:
    options = arguments()
    workspace = options.workspace
    checkpoints = workspace / "checkpoints"
    # Otherwise the job would go on where the last one ended.
    shutil.rmtree(checkpoints, ignore_errors=True)
    workspace.mkdir(parents=True, exist_ok=True)

    model = Decoder(options.size)
    base = options.base or nvflare_lazy.save(model.state_dict(), workspace / "base.safetensors")
    model.load_state_dict(nvflare_lazy.open(base))
    start = base
    if options.lora:
        adapt(model)
        start = nvflare_lazy.save(adapters(model), workspace / "adapters.safetensors")
    weights = nvflare_lazy.open(start)
    size = sum(weight.nbytes for weight in weights.values())
    loss_before = held_out_loss(model, options.size)

    recipe = recipe_for(options, base, start, checkpoints)
    if options.env == "poc":
        env = PocEnv(num_clients=SITES)
        mark, root = env.poc_workspace, 1
    else:
        env = SimEnv(num_clients=SITES, workspace_root=str(workspace))
        mark, root = "simulator.simulator", os.getpid()
    with Sampler(lambda: servers(root, mark)) as watched:
        run = recipe.execute(env)
        result = run.get_result(clean_up=False)
    if run.get_status() not in (None, "FINISHED:COMPLETED"):
        print(f"the job ended with {run.get_status()}; its logs are in {result}")
        return 1
    if options.stock:
        trained = nvflare_lazy.open(
            workspace / "llm" / "server" / "simulate_job" / "app_server" / "FL_global_model.pt", section="model"
        )
    else:
        trained = nvflare_lazy.open(checkpoints / "FL_global_model.safetensors")
    model.load_state_dict(trained, strict=not options.lora)
    loss_after = held_out_loss(model, options.size)

    what = "adapters (LoRA)" if options.lora else "all weights"
    count = sum(weight.numel() for weight in weights.values())
    print(f"\n{options.size}, {what}: {count:,} in bfloat16, {size / MIB:.1f} MiB")
    print(f"held-out loss: {loss_before:.2f} before, {loss_after:.2f} after {options.rounds} rounds of {SITES} sites")
    peak = max(sample.anon for sample in watched.samples)
    print(f"server memory at most: {peak / MIB:.0f} MiB")
    if options.stock:
        return 0
    contributions = on_disk(Path(result))
    print(f"results received on disk: {sum(contributions)} of {len(contributions)}")
    print(f"the result is {checkpoints / 'FL_global_model.safetensors'}")
    return 0 if loss_after < loss_before - 0.3 and sum(contributions) == SITES * options.rounds else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--lora", action="store_true", help="train adapters and exchange only them")
    parser.add_argument("--base", type=Path, help="a checkpoint of this size to begin with; untrained if not given")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--env", choices=("sim", "poc"), default="sim", help="simulator, or a server and sites")
    parser.add_argument("--stock", action="store_true", help="NVFlare's own recipe, to compare")
    parser.add_argument("--workspace", type=Path, default=Path("/tmp/nvflare/simulation"))
    options = parser.parse_args()
    if options.stock and (options.lora or options.env == "poc"):
        parser.error("--stock is for all weights in the simulator")
    return options


def recipe_for(options: argparse.Namespace, base: Path, start: Path, checkpoints: Path) -> StockFedAvgRecipe:
    """Return the job with our recipe, or with NVFlare's."""
    steps, batch, length = TRAINING[options.size]
    script_args = f"--size {options.size} --base {base} --steps {steps} --batch {batch} --length {length}"
    common = {
        "name": "llm",
        "min_clients": SITES,
        "num_rounds": options.rounds,
        "train_script": str(HERE / "client.py"),
        "launch_external_process": True,
        "command": f"{sys.executable} -u",
        "key_metric": "loss",
        "key_metric_mode": "min",
    }
    if options.stock:
        return StockFedAvgRecipe(
            model={"class_path": "model.Decoder", "args": {"size": options.size}},
            initial_ckpt=str(start),
            server_expected_format=ExchangeFormat.PYTORCH,
            train_args=f"{script_args} --stock",
            **common,
        )
    return FedAvgRecipe(
        checkpoint=str(start),
        checkpoint_dir=str(checkpoints),
        train_args=f"{script_args} --lora" if options.lora else script_args,
        **common,
    )


@torch.no_grad()
def held_out_loss(model: Decoder, size: str) -> float:
    """Return the loss on text that no site has."""
    return model.loss(text([1, 2], 4, TRAINING[size][2], seed=0)).item()


def servers(root: int, mark: str) -> dict[int, str]:
    """Find the process that runs the job's server, below a process and with a mark in its command."""
    kinds = ("simulator.simulator", "runner_process")
    return {pid: "server" for pid, command in descendants(root) if mark in command and any(k in command for k in kinds)}


def on_disk(run: Path) -> list[bool]:
    """Say of each result the server received whether it was on disk."""
    records = [json.loads(line) for path in run.rglob("nvflare_lazy.jsonl") for line in path.read_text().splitlines()]
    return [record["on_disk"] for record in records if record["kind"] == "contribution"]


if __name__ == "__main__":
    raise SystemExit(main())
