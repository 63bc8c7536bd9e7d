# SPDX-License-Identifier: Apache-2.0
"""Sites fine-tune a Hugging Face model, all of its weights or a LoRA adapter; the result is loaded and writes text."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from corpus import token_rows
from nvflare.app_opt.pt.recipes import FedAvgRecipe as StockFedAvgRecipe
from nvflare.client.config import ExchangeFormat
from nvflare.recipe import PocEnv, SimEnv
from peft import PeftModel
from start import SIZES, make_adapter, make_base
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import nvflare_lazy
from benchmarks.fl_job import MIB, Sampler
from benchmarks.fl_job.sampling import descendants
from nvflare_lazy.recipes import FedAvgRecipe

HERE = Path(__file__).parent
SITES = 2
# Steps of a round, rows of a step, tokens of a row: half a minute for a core.
TRAINING = {"tiny": (30, 8, 64), "360m": (4, 2, 64)}


def main() -> int:
    options = arguments()
    disable_progress_bar()
    workspace = options.workspace.resolve()
    checkpoints = workspace / "checkpoints"
    # Otherwise the job would resume where the last one ended.
    shutil.rmtree(checkpoints, ignore_errors=True)
    base = (options.base or workspace / "base").resolve()
    if options.base is None:
        make_base(options.size, base)
    start = base
    if options.lora:
        start = workspace / "adapter"
        make_adapter(base, start)

    recipe = recipe_for(options, base, start, checkpoints)
    if options.env == "poc":
        env = PocEnv(num_clients=SITES)
        mark, root = env.poc_workspace, 1
    else:
        env = SimEnv(num_clients=SITES, workspace_root=str(workspace))
        mark, root = "simulator.simulator ", os.getpid()
    with Sampler(lambda: roles(root, mark)) as watched:
        run = recipe.execute(env)
        result = run.get_result(clean_up=False)
    if run.get_status() not in (None, "FINISHED:COMPLETED"):
        print(f"the job ended with {run.get_status()}; its logs are in {result}")
        return 1

    if options.stock:
        models = [start, exported(Path(result), base, workspace / "exported")]
    else:
        # `from_pretrained` loads the model of each round.
        models = [start, *sorted((checkpoints / "rounds").iterdir())]
    losses = [held_out_loss(path, base, options.size) for path in models]
    weights = nvflare_lazy.open(start)
    size = sum(weight.nbytes for weight in weights.values())
    what = "LoRA adapter" if options.lora else "all weights"
    count = sum(weight.numel() for weight in weights.values())
    print(f"\n{options.size}, {what}: {count:,} numbers, {size / MIB:.1f} MiB")
    print(f"held-out loss: {' -> '.join(f'{loss:.2f}' for loss in losses)}")
    for role in ("server", "trainer"):
        peak = max(sample.anon for sample in watched.samples if sample.role.startswith(role))
        print(f"peak memory of {'the server' if role == 'server' else 'a trainer'}: {peak / MIB:.0f} MiB")
    print(f"before: {written_text(start, base)}")
    print(f"after: {written_text(models[-1], base)}")
    if find_spec("matplotlib"):
        from picture import draw

        draw(watched.samples, losses, f"{options.size}, {what}", workspace / "llm.png")
        print(f"the chart is {workspace / 'llm.png'}")
    print(f"the result is {models[-1] if options.stock else checkpoints}")
    return 0 if losses[-1] < losses[0] - 0.3 else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--lora", action="store_true", help="train an adapter, and exchange nothing else")
    parser.add_argument("--base", type=Path, help="start with this Hugging Face directory instead of a new model")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--env", choices=("sim", "poc"), default="sim", help="simulator, or a server and sites")
    parser.add_argument("--stock", action="store_true", help="use NVFlare's own recipe, to compare")
    parser.add_argument("--workspace", type=Path, default=Path("/tmp/nvflare/simulation"))
    options = parser.parse_args()
    if options.stock and (options.lora or options.env == "poc"):
        parser.error("--stock is for all weights in the simulator")
    return options


def recipe_for(options: argparse.Namespace, base: Path, start: Path, checkpoints: Path) -> StockFedAvgRecipe:
    """Return the job with our recipe, or with NVFlare's."""
    steps, batch, length = TRAINING[options.size]
    arguments = f"--base {base} --steps {steps} --batch {batch} --length {length}"
    common = {
        "name": "llm",
        "min_clients": SITES,
        "num_rounds": options.rounds,
        "train_script": str(HERE / "client.py"),
        "launch_external_process": True,
        "command": f"{sys.executable} -u",
        "key_metric": "eval_loss",
        "key_metric_mode": "min",
    }
    if options.stock:
        recipe = StockFedAvgRecipe(
            model={"class_path": "start.stock_model", "args": {"path": str(base)}},
            server_expected_format=ExchangeFormat.PYTORCH,
            train_args=f"{arguments} --stock",
            **common,
        )
        recipe.add_server_file(str(HERE / "start.py"))
        return recipe
    return FedAvgRecipe(
        checkpoint=str(start),
        checkpoint_dir=str(checkpoints),
        keep_rounds=options.rounds,
        train_args=f"{arguments} --adapter {start}" if options.lora else arguments,
        **common,
    )


def load(path: Path, base: Path) -> torch.nn.Module:
    """Load a model, or an adapter and its base."""
    if not (path / "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), path)


@torch.no_grad()
def held_out_loss(path: Path, base: Path, size: str) -> float:
    """Return the loss for new sentences about the subjects of both sites."""
    rows = token_rows(AutoTokenizer.from_pretrained(base), [1, 2], 8, TRAINING[size][2], seed=-1)
    return load(path, base)(input_ids=rows, labels=rows).loss.item()


def written_text(path: Path, base: Path) -> str:
    """Let the model continue a sentence, and return its text."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    torch.manual_seed(0)
    prompt = tokenizer(" she sees the moon.", return_tensors="pt")["input_ids"]
    tokens = load(path, base).generate(prompt, do_sample=True, top_k=5, min_new_tokens=40, max_new_tokens=40)
    return tokenizer.decode(tokens[0, prompt.shape[1] :]).strip()


def exported(result: Path, base: Path, out: Path) -> Path:
    """Write the result of the stock recipe as a Hugging Face directory."""
    [model] = result.rglob("FL_global_model.pt")
    command = [sys.executable, "-m", "nvflare_lazy.cli", "export", model, "--base", base, "-o", out, "--force"]
    subprocess.run(command, check=True)
    return out


def roles(root: int, mark: str) -> dict[int, str]:
    """Find the processes of the server job and of the trainers, below a process and with a mark in their command."""
    found = {}
    for pid, command in descendants(root):
        if "client.py" in command and "--base" in command:
            found[pid] = "trainer"
        elif mark in command and ("simulator.simulator" in command or "runner_process" in command):
            found[pid] = "server"
    return found


if __name__ == "__main__":
    raise SystemExit(main())
