# SPDX-License-Identifier: Apache-2.0
"""One of four sites is poisoned: the mean of their models is ruined, the trimmed mean is not."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from model import MoonNet, accuracy
from moons import moons
from nvflare.recipe.sim_env import SimEnv
from nvflare.recipe.utils import set_per_site_config
from picture import draw

import nvflare_lazy
from nvflare_lazy.recipes import FedAvgRecipe

HERE = Path(__file__).parent
SITES = 4
POISONED = "site-4"
RULES = {"mean": {}, "trimmed_mean": {"num_byzantine": 1}}
GOOD, RUINED = 0.9, 0.7


def run(rule: str, rounds: int, untrained: Path, workspace: Path) -> list[Path]:
    """Run the job with one rule; returns the model of each round."""
    recipe = FedAvgRecipe(
        name=f"robust_{rule}",
        checkpoint=str(untrained),
        min_clients=SITES,
        num_rounds=rounds,
        train_script=str(HERE / "client.py"),
        rule=rule,
        rule_args=RULES[rule],
        keep_rounds=rounds,
    )
    sites = {f"site-{number}": {} for number in range(1, SITES + 1)}
    set_per_site_config(recipe, {**sites, POISONED: {"train_args": "--poisoned"}})
    result = recipe.execute(SimEnv(clients=list(sites), workspace_root=str(workspace))).get_result()
    directory = Path(result) / "server" / "simulate_job"
    models = json.loads((directory / "artifact_manifest.json").read_text())["artifacts"]
    return [directory / models[f"round_{number}"] for number in range(rounds)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--picture", type=Path, help="File of the chart. Default: next to the jobs.")
    parser.add_argument("--workspace", type=Path, default=Path("/tmp/nvflare/simulation"))
    options = parser.parse_args()
    options.workspace.mkdir(parents=True, exist_ok=True)
    picture = options.picture or options.workspace / "robust.png"

    torch.manual_seed(1)
    start = MoonNet()
    untrained = nvflare_lazy.save(start.state_dict(), options.workspace / "untrained.safetensors")
    test = moons(2000, seed=0)
    models, curves = {}, {}
    for rule in RULES:
        checkpoints = run(rule, options.rounds, untrained, options.workspace)
        models[rule] = MoonNet()
        curves[rule] = [accuracy(start, *test)]
        for checkpoint in checkpoints:
            models[rule].load_state_dict(nvflare_lazy.open(checkpoint))
            curves[rule].append(accuracy(models[rule], *test))
    title = f"{SITES} sites train together, and {POISONED} sends the opposite of what it learned, ten times over"
    draw(models, curves, test, title, picture)

    print("\naccuracy after round" + "".join(f"{number:7}" for number in range(options.rounds)))
    for rule, values in curves.items():
        print(f"{rule:20}" + "".join(f"{value:7.3f}" for value in values[1:]))
    print(f"the picture is {picture}")
    return 0 if curves["trimmed_mean"][-1] > GOOD and curves["mean"][-1] < RUINED else 1


if __name__ == "__main__":
    raise SystemExit(main())
