# SPDX-License-Identifier: Apache-2.0
"""Jobs from a Hugging Face directory to a Hugging Face directory, with NVFlare's client for Hugging Face.

Slow, because an ordinary environment does not have these libraries: `test_matrix.py` runs this module in environments
that do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nvflare.app_opt.pt.recipes import FedAvgRecipe as StockFedAvgRecipe
from nvflare.client.config import ExchangeFormat
from nvflare.recipe import SimEnv
from safetensors.torch import load_file

import nvflare_lazy
from nvflare_lazy.recipes import FedAvgRecipe, SwarmLearningRecipe, make_lazy

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # those of the libraries are not ours
]

os.environ["HF_HUB_OFFLINE"] = "1"
TRAIN = Path(__file__).parent / "hugging_face" / "train.py"
WRAPPERS = TRAIN.with_name("wrappers.py")
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
def adapter(tmp_path, base) -> Path:
    """An adapter whose matrices are not zero."""
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, base_model_name_or_path=str(base)
    )
    torch.manual_seed(2)
    peft.get_peft_model(loaded(base), config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs two rounds of a job and returns the directory of its checkpoints."""
    monkeypatch.setenv("NVFLARE_LAZY_SCRATCH", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir(mode=0o700)
    # NVFlare finds these files only outside packages that are on the path.
    script, wrappers = (shutil.copy(path, tmp_path) for path in (TRAIN, WRAPPERS))

    def run(checkpoint: Path | None, arguments: str, *, stock_recipe: bool = False, **options: object) -> Path:
        if checkpoint is not None:
            options["checkpoint"] = str(checkpoint)
        if not stock_recipe:
            options["checkpoint_dir"] = str(tmp_path / "checkpoints")
        recipe = (StockFedAvgRecipe if stock_recipe else FedAvgRecipe)(
            name="hf",
            min_clients=2,
            num_rounds=2,
            train_script=script,
            train_args=arguments,
            command=f"{sys.executable} -u",
            server_expected_format=ExchangeFormat.PYTORCH,
            **options,
        )
        if stock_recipe:
            make_lazy(recipe, checkpoint_dir=str(tmp_path / "checkpoints"))
        if "model" in options:
            recipe.add_server_file(wrappers)
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


def check_adapter(result: Path, adapter: Path, base: Path) -> None:
    """Check that PEFT loads an adapter that has an effect, and the same one as another adapter."""
    model = peft.PeftModel.from_pretrained(loaded(base), result)
    before = peft.PeftModel.from_pretrained(loaded(base), adapter)
    assert not torch.equal(logits(model), logits(loaded(base)))
    assert torch.equal(logits(model), logits(before))


def exported(result: Path, base: Path) -> Path:
    """Export the result of a job that did not start from a directory."""
    command = [sys.executable, "-m", "nvflare_lazy.cli", "export", result / "FL_global_model.safetensors"]
    subprocess.run([*command, "--base", base, "-o", result / "exported"], check=True)
    return result / "exported"


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
def test_an_adapter_is_the_same_after_rounds_without_training(run, base, adapter, prefix):
    """PEFT loads every matrix of it, also if the client puts a prefix before the names."""
    arguments = f"--base {base} --adapter {adapter}" + (f" --prefix {prefix}" if prefix else "")
    check_adapter(run(adapter, arguments), adapter, base)


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


@pytest.mark.parametrize(("external", "stock_recipe"), [(False, False), (True, False), (True, True)])
def test_a_job_from_a_class_that_wraps_a_tied_model(run, base, external, stock_recipe):
    """As in NVFlare's example llm_hf, with our recipe or `make_lazy`: `export` finds the prefix of the wrapper."""
    model = {"class_path": "wrappers.WholeModel", "args": {"base": str(base)}}
    arguments = f"--base {base} --prefix model."
    result = run(None, arguments, stock_recipe=stock_recipe, model=model, launch_external_process=external)
    check_everywhere(exported(result, base), base)


@pytest.mark.parametrize(("external", "prefix"), [(False, "model."), (True, "")])
def test_a_job_from_a_class_that_wraps_an_adapter(run, base, adapter, external, prefix):
    """As in NVFlare's examples llm_hf and hello-huggingface: with and without a prefix."""
    args = {"base": str(base), "adapter": str(adapter), "prefix": prefix}
    arguments = f"--base {base} --adapter {adapter}" + (f" --prefix {prefix}" if prefix else "")
    model = {"class_path": "wrappers.AdapterModel", "args": args}
    result = run(None, arguments, model=model, launch_external_process=external)
    check_adapter(exported(result, adapter), adapter, base)
