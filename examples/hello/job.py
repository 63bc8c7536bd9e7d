# SPDX-License-Identifier: Apache-2.0
"""Two sites train a model for digits; one has mostly small ones, the other mostly large ones."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from digits import TEST_SHARES, draw
from model import DigitNet, evaluate
from nvflare.recipe.sim_env import SimEnv

import nvflare_lazy
from nvflare_lazy.recipes import FedAvgRecipe

HERE = Path(__file__).parent
SITES = 2
ENOUGH = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workspace", default="/tmp/nvflare/simulation")
    options = parser.parse_args()
    workspace = Path(options.workspace)
    workspace.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    model = DigitNet()
    test = draw(2000, TEST_SHARES, seed=0)
    history = [("untrained", *evaluate(model, *test))]

    untrained = nvflare_lazy.save(model.state_dict(), workspace / "untrained.safetensors")
    recipe = FedAvgRecipe(
        name="hello",
        # Or model=model, as with NVFlare's recipe; that makes a new one, not this one.
        checkpoint=str(untrained),
        min_clients=SITES,
        num_rounds=options.rounds,
        train_script=str(HERE / "client.py"),
        # Rounds whose checkpoints are kept.
        keep_rounds=options.rounds,
    )
    run = recipe.execute(SimEnv(num_clients=SITES, workspace_root=str(workspace)))
    result = Path(run.get_result()) / "server" / "simulate_job"
    models = json.loads((result / "artifact_manifest.json").read_text())["artifacts"]

    for number in range(options.rounds):
        # Opening a checkpoint reads no tensor; load_state_dict reads one after the other.
        model.load_state_dict(nvflare_lazy.open(result / models[f"round_{number}"]))
        history.append((f"round {number}", *evaluate(model, *test)))

    print("\nglobal model     loss   accuracy")
    for name, loss, accuracy in history:
        print(f"{name:10} {loss:10.3f} {accuracy:10.3f}")
    print(f"it is in {result / models['global_model']}")
    (_, loss_before, _), (_, loss, accuracy) = history[0], history[-1]
    return 0 if loss < loss_before and accuracy > ENOUGH else 1


if __name__ == "__main__":
    raise SystemExit(main())
