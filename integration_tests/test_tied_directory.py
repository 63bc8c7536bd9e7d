# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD, FedOpt and FedProx from a Hugging Face directory with tied weights to another one, without transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.recipe import SimEnv

import nvflare_lazy
from nvflare_lazy.recipes import FedOptRecipe, FedProxRecipe, ScaffoldRecipe

TIED = Path(__file__).parent / "tied"
CONFIG = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 32, "tie_word_embeddings": True}
MOMENTUM = {"path": "torch.optim.SGD", "args": {"lr": 1.0, "momentum": 0.3}}
ALGORITHMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "scaffold": (ScaffoldRecipe, {"train_args": "--scaffold"}),
    "fedopt": (FedOptRecipe, {"optimizer_args": MOMENTUM}),
    "fedprox": (FedProxRecipe, {"fedprox_mu": 0.1, "train_args": "--fedprox"}),
}


@pytest.fixture
def net(monkeypatch):
    monkeypatch.syspath_prepend(str(TIED))
    import net

    yield net
    sys.modules.pop("net", None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaffold", "fedopt", "fedprox"])
def test_it_learns_and_stores_the_tied_tensor_once(name, net, tmp_path, monkeypatch):
    """Clients load strictly, so they get every name; the result is a directory of the names that there were."""
    monkeypatch.setenv("NVFLARE_LAZY_SCRATCH", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir(mode=0o700)
    base, result = tmp_path / "base", tmp_path / "checkpoints"
    torch.manual_seed(1)
    model = net.Net()
    tensors = {key: value for key, value in model.state_dict().items() if key != "lm_head.weight"}
    nvflare_lazy.save(tensors, f"{base}/", max_shard_size=2100)
    (base / "config.json").write_text(json.dumps(CONFIG))
    recipe_class, arguments = ALGORITHMS[name]
    recipe = recipe_class(
        name=name,
        checkpoint=str(base),
        checkpoint_dir=str(result),
        min_clients=2,
        num_rounds=2,
        train_script=str(TIED / "train.py"),
        **arguments,
    )
    recipe.execute(SimEnv(num_clients=2, workspace_root=str(tmp_path / "workspace")))
    saved = nvflare_lazy.open(result / "model.safetensors")
    assert saved.keys() == tensors.keys()
    assert json.loads((result / "config.json").read_text()) == CONFIG
    learned = net.Net()
    learned.load_state_dict({**saved, "lm_head.weight": saved["model.embed_tokens.weight"]})
    assert learned.loss() < 0.8 * model.loss()
