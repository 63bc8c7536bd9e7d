# SPDX-License-Identifier: Apache-2.0
"""Jobs from a Hugging Face directory to a Hugging Face directory, with NVFlare's client for Hugging Face.

Slow, because an ordinary environment does not have these libraries: `test_matrix.py` runs this module in environments
that do.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from nvflare.client.config import ExchangeFormat
from nvflare.recipe import SimEnv
from safetensors.torch import load_file

import nvflare_lazy
from nvflare_lazy.recipes import FedAvgRecipe, SwarmLearningRecipe

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # those of the libraries are not ours
]

os.environ["HF_HUB_OFFLINE"] = "1"
TRAIN = Path(__file__).parent / "hugging_face" / "train.py"
TOKENS = torch.arange(12).reshape(2, 6)


@pytest.fixture
def base(tmp_path) -> Path:
    """A model with tied embeddings."""
    config = transformers.Qwen2Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "base", max_shard_size="20KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    return tmp_path / "base"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs two rounds of a job and returns the directory of its checkpoints."""
    monkeypatch.setenv("NVFLARE_LAZY_SCRATCH", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir(mode=0o700)
    # NVFlare finds the script of an external trainer only outside of packages that are on the path.
    script = shutil.copy(TRAIN, tmp_path)

    def run(checkpoint: Path, arguments: str, **options: object) -> Path:
        recipe = FedAvgRecipe(
            name="hf",
            checkpoint=str(checkpoint),
            checkpoint_dir=str(tmp_path / "checkpoints"),
            min_clients=2,
            num_rounds=2,
            train_script=script,
            train_args=arguments,
            command=f"{sys.executable} -u",
            server_expected_format=ExchangeFormat.PYTORCH,
            **options,
        )
        recipe.execute(SimEnv(num_clients=2, workspace_root=str(tmp_path / "workspace")))
        return tmp_path / "checkpoints"

    return run


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def loaded(path: Path) -> torch.nn.Module:
    """Load a directory, which must have every parameter and nothing else."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model


def check_everywhere(result: Path, base: Path, *, has_names_of_model: bool = True) -> None:
    """Check that transformers, accelerate and safetensors load a directory, with the values of another one."""
    expected = logits(loaded(base))
    assert torch.equal(logits(loaded(result)), expected)
    if has_names_of_model:  # accelerate does not rename tensors
        with accelerate.init_empty_weights():
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(base))
        model.tie_weights()
        accelerate.load_checkpoint_and_dispatch(model, str(result), device_map={"": "cpu"})
        assert torch.equal(logits(model), expected)
    stored = nvflare_lazy.open(base)
    found = {name: tensor for path in result.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert found.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name].materialize()) for name, tensor in found.items())


@pytest.mark.parametrize(
    "options",
    [{"offload_clients": False}, {}, {"launch_external_process": True}],
    ids=["level 2", "level 3", "level 3, external"],
)
def test_a_tied_model_is_the_same_after_rounds_without_training(run, base, options):
    """From an untouched directory to one that `from_pretrained` loads; the tied tensor is stored once."""
    result = run(base, f"--base {base}", **options)
    check_everywhere(result, base)
    assert nvflare_lazy.open(result).keys() == nvflare_lazy.open(base).keys()
    assert len(list(result.glob("*.safetensors"))) > 1
    for number in range(2):
        check_everywhere(result / "rounds" / f"round-{number:05d}", base)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_whose_tensors_are_renamed(run, tmp_path, tied):
    """transformers 5 has another name for the head of GPT-NeoX than directories have, and than transformers 4."""
    config = transformers.GPTNeoXConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(1)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "base")
    result = run(tmp_path / "base", f"--base {tmp_path / 'base'}")
    check_everywhere(result, tmp_path / "base", has_names_of_model=False)


@pytest.mark.parametrize("prefix", [None, "model."])
def test_an_adapter_is_the_same_after_rounds_without_training(run, base, tmp_path, prefix):
    """PEFT loads every matrix of it, also if the client puts a prefix before the names."""
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, base_model_name_or_path=str(base)
    )
    torch.manual_seed(2)
    adapter = tmp_path / "adapter"
    peft.get_peft_model(loaded(base), config).save_pretrained(adapter)
    arguments = f"--base {base} --adapter {adapter}" + (f" --prefix {prefix}" if prefix else "")
    result = run(adapter, arguments)
    model = peft.PeftModel.from_pretrained(loaded(base), result)
    before = peft.PeftModel.from_pretrained(loaded(base), adapter)
    assert not torch.equal(logits(model), logits(loaded(base)))
    assert torch.equal(logits(model), logits(before))


def test_training_changes_the_result(run, base):
    """A job that trains both ends with another model, which loads completely, and knows the best one."""
    result = run(base, f"--base {base} --lr 0.1")
    assert not torch.equal(logits(loaded(result)), logits(loaded(base)))


def test_swarm_learning_from_a_tied_directory(base, tmp_path, monkeypatch):
    """The clients that aggregate store the tied tensor once; each client has a complete directory at the end."""
    monkeypatch.setenv("NVFLARE_LAZY_SCRATCH", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir(mode=0o700)
    recipe = SwarmLearningRecipe(
        name="swarm",
        checkpoint=str(base),
        min_clients=2,
        num_rounds=2,
        train_script=shutil.copy(TRAIN, tmp_path),
        train_args={"script_args": f"--base {base}"},
    )
    recipe.execute(SimEnv(num_clients=2, workspace_root=str(tmp_path / "workspace")))
    for site in ("site-1", "site-2"):
        result = tmp_path / "workspace" / "swarm" / site / "simulate_job" / f"app_{site}"
        assert torch.equal(logits(loaded(result)), logits(loaded(base)))
        assert nvflare_lazy.open(result).keys() == nvflare_lazy.open(base).keys()
