# SPDX-License-Identifier: Apache-2.0
"""Directories and adapters that this package writes load in the real transformers, accelerate and PEFT.

Slow, because an ordinary environment does not have these libraries: `test_matrix.py` runs this module in environments
that do.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import nvflare_lazy
from nvflare_lazy.cli.program import run
from nvflare_lazy.flare.parameters_on_disk import ParametersOnDisk
from nvflare_lazy.formats.hugging_face import ModelDirectory
from nvflare_lazy.formats.hugging_face.lora import merge_lora
from nvflare_lazy.formats.hugging_face.tied import tied_names
from tests.flare.test_parameters_on_disk import mapped_addresses

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # those of the libraries are not ours
]

os.environ["HF_HUB_OFFLINE"] = "1"
TOKENS = torch.arange(12).reshape(2, 6)


def qwen(*, tied: bool = True, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    config = transformers.Qwen2Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def gpt2(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    config = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def loaded(path: Path) -> torch.nn.Module:
    """Load a directory, which must have every parameter and nothing else."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", chat_template="{{ 1 }}")
    fast.save_pretrained(directory)


@pytest.fixture
def base(tmp_path) -> Path:
    qwen().save_pretrained(tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("shard", [None, "20KB"])
def test_a_saved_directory_loads_everywhere(base, tmp_path, shard):
    """`save(like=)` and `aggregate --like` write what from_pretrained, accelerate and PEFT's base models load."""
    expected = logits(loaded(base))
    tensors = nvflare_lazy.open(base)
    nvflare_lazy.save(tensors, tmp_path / "saved", like=base, max_shard_size=shard, metadata={"k": "v"})
    sizes = ["--max-shard-size", shard] if shard else []
    assert (
        run(
            [
                "aggregate",
                str(base),
                str(tmp_path / "saved"),
                "--like",
                str(base),
                "--out",
                str(tmp_path / "mean"),
                *sizes,
            ]
        )
        == 0
    )
    assert run(["convert", str(base), str(tmp_path / "new" / "directory"), "--like", str(base), *sizes]) == 0
    for path in (tmp_path / "saved", tmp_path / "mean", tmp_path / "new" / "directory"):
        assert torch.equal(logits(loaded(path)), expected)
        assert transformers.AutoTokenizer.from_pretrained(path)("a b")["input_ids"] == [1, 2]
        assert ({file.name for file in path.iterdir() if file.suffix != ".safetensors" and "index" not in file.name}
                == {file.name for file in base.iterdir() if file.suffix != ".safetensors"})  # fmt: skip
        with accelerate.init_empty_weights():
            model = qwen()
        model.tie_weights()
        accelerate.load_checkpoint_and_dispatch(model, str(path), device_map={"": "cpu"})
        assert torch.equal(logits(model), expected)
    if shard:
        model = qwen()
        model.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
        index = "model.safetensors.index.json"
        theirs, ours = (json.loads((path / index).read_text()) for path in (tmp_path / "theirs", tmp_path / "saved"))
        assert theirs["metadata"].items() <= {**ours["metadata"], **theirs["metadata"]}.items()
        assert theirs["metadata"]["total_size"] == ours["metadata"]["total_size"]
        assert (
            theirs["metadata"].get("total_parameters", model.num_parameters()) == ours["metadata"]["total_parameters"]
        )
        assert theirs["weight_map"].keys() == ours["weight_map"].keys()


@pytest.mark.parametrize("prefix", ["", "model.", "wrapper.net.", None])
@pytest.mark.parametrize("tied", [True, False])
def test_export(tmp_path, prefix, tied):
    """A result as NVFlare's client sends it, tied weights twice or the prefix lost, becomes a directory that loads."""
    qwen(tied=tied).save_pretrained(tmp_path / "base")
    trained = qwen(tied=tied)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.01)
    weights = trained.state_dict()
    if prefix is None:  # stripped by `server_key_prefix`
        renamed = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    else:
        renamed = {prefix + name: tensor for name, tensor in weights.items()}
    torch.save({"model": renamed, "train_conf": {}}, tmp_path / "FL_global_model.pt")
    out = tmp_path / "out"
    assert run(["export", str(tmp_path / "FL_global_model.pt"), "--base", str(tmp_path / "base"), "-o", str(out)]) == 0
    assert torch.equal(logits(loaded(out)), logits(trained))
    assert nvflare_lazy.open(out).keys() == nvflare_lazy.open(tmp_path / "base").keys()


def adapted(model: torch.nn.Module, adapter_name: str = "default", **config: object) -> torch.nn.Module:
    """Return a PEFT model whose adapter is not zero."""
    torch.manual_seed(2)
    config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, **config})
    model = peft.get_peft_model(model, config, adapter_name)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("how", ["saved", "all parameters", "without weights"])
def test_export_an_adapter(base, tmp_path, prefix, how, recwarn):
    """A LoRA result loads in PEFT with all of its matrices, whatever prefix it had."""
    model = adapted(loaded(base), target_modules=["q_proj", "v_proj"])
    initial = tmp_path / "adapter"
    model.save_pretrained(initial)
    if how == "without weights":
        (initial / "adapter_model.safetensors").unlink()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(2)
    result = model.state_dict() if how == "all parameters" else peft.get_peft_model_state_dict(model)
    nvflare_lazy.save({prefix + name: tensor for name, tensor in result.items()}, tmp_path / "result.safetensors")
    arguments = ["export", "result.safetensors", "--base", str(initial), "--adapter", "-o", str(tmp_path / "out")]
    assert run([text.replace("result.safetensors", str(tmp_path / "result.safetensors")) for text in arguments]) == 0
    recwarn.clear()
    back = peft.PeftModel.from_pretrained(loaded(base), tmp_path / "out").eval()
    assert not [warning for warning in recwarn if "missing" in str(warning.message)]
    assert torch.equal(logits(back), logits(model))


ADAPTERS = {
    "several targets": {"target_modules": ["q_proj", "k_proj", "down_proj"]},
    "all linear": {"target_modules": "all-linear"},
    "patterns": {
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "rank_pattern": {"v_proj": 2, r".*layers\.0\.mlp\.up_proj": 7},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 5},
    },
    "rank-stabilized": {"target_modules": ["q_proj"], "use_rslora": True, "lora_alpha": 3},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "modules to save": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "dora of embeddings": {"target_modules": ["embed_tokens"], "use_dora": True},
    "biases": {"target_modules": ["q_proj"], "lora_bias": True},
    "trained biases": {"target_modules": ["q_proj"], "bias": "all"},
    "output": {"target_modules": ["lm_head"]},
}


def merged_by_peft(base: Path, adapter: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, **{DTYPE: dtype})
    return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()


DTYPE = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ADAPTERS)
def test_merge(tmp_path, name, dtype):
    """The merged model has PEFT's bits, whatever the adapter is."""
    model = qwen(tied=False, dtype=dtype)
    model.save_pretrained(tmp_path / "base")
    adapted(model, **ADAPTERS[name]).save_pretrained(tmp_path / "adapter")
    assert run(["merge-lora", *(str(tmp_path / part) for part in ("base", "adapter", "out"))]) == 0
    expected = merged_by_peft(tmp_path / "base", tmp_path / "adapter", dtype)
    found = nvflare_lazy.open(tmp_path / "out")
    changed = [
        key for key, tensor in nvflare_lazy.open(tmp_path / "base").items() if not torch.equal(tensor, found[key])
    ]
    assert changed
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key].materialize(), tensor), key
    loaded(tmp_path / "out")


@pytest.mark.parametrize("dora", [False, True])
def test_merge_transposed_layers_and_tied_embeddings(tmp_path, dora):
    """GPT-2: layers that store the transposed matrix, square ones among them, and a tied embedding."""
    model = gpt2()
    model.save_pretrained(tmp_path / "base")
    targets = ["c_attn", "c_proj", "c_fc"] if dora else ["c_attn", "c_proj", "c_fc", "wte"]
    adapted(model, target_modules=targets, use_dora=dora).save_pretrained(tmp_path / "adapter")
    base = ModelDirectory(tmp_path / "base")
    merged = merge_lora(base, ModelDirectory(tmp_path / "adapter"))
    nvflare_lazy.save(merged, tmp_path / "out", like=base)
    expected = merged_by_peft(tmp_path / "base", tmp_path / "adapter", torch.float32)
    found = loaded(tmp_path / "out").state_dict()
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_merge_into_a_tied_model(tmp_path):
    """An adapter of the embedding also changes the tied output."""
    model = qwen()
    model.save_pretrained(tmp_path / "base")
    adapted(model, target_modules=["embed_tokens"]).save_pretrained(tmp_path / "adapter")
    assert run(["merge-lora", *(str(tmp_path / part) for part in ("base", "adapter", "out"))]) == 0
    expected = merged_by_peft(tmp_path / "base", tmp_path / "adapter", torch.float32)
    assert torch.equal(loaded(tmp_path / "out").state_dict()["lm_head.weight"], expected["lm_head.weight"])


CONFIGURATIONS = {
    "qwen2": {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama": {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 256, "n_head": 4, "n_layer": 2},
    "bert": {"hidden_size": 256, "intermediate_size": 512},
    "t5": {"d_model": 256, "d_ff": 512, "num_layers": 2, "num_heads": 4},
    "vit": {"hidden_size": 256, "intermediate_size": 512},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_instantiation_on_disk(tmp_path, name, dtype):
    """`from_config` on disk gives the values and ties of `from_config`."""
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 2000}
    config = transformers.AutoConfig.for_model(name, **layers, **CONFIGURATIONS[name])
    kinds = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM", "vit": "AutoModelForImageClassification"}
    kind = getattr(transformers, kinds.get(name, "AutoModelForCausalLM"))
    torch.manual_seed(3)
    expected = kind.from_config(config, **{DTYPE: dtype})
    torch.manual_seed(3)
    with ParametersOnDisk(tmp_path):
        found = kind.from_config(config, **{DTYPE: dtype})
    pairs = list(zip(expected.named_parameters(), found.named_parameters(), strict=True))
    pairs += list(zip(expected.named_buffers(), found.named_buffers(), strict=True))
    for (one, tensor), (two, other) in pairs:
        assert (one, tensor.dtype) == (two, other.dtype)
        assert torch.equal(tensor, other), one
    assert found.state_dict().keys() == expected.state_dict().keys()
    mapped = mapped_addresses()
    large = {name: part for name, part in found.named_parameters() if part.nbytes >= 4096}
    assert large
    assert [name for name, part in large.items() if not any(part.data_ptr() in area for area in mapped)] == []


def empty_qwen(base: Path) -> torch.nn.Module:
    with accelerate.init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(base))
    return model.eval()


def test_offload_with_lazy_state(base):
    """`cpu_offload` takes lazy tensors: a layer's weights are loaded while it runs, each time."""
    expected = logits(loaded(base))
    weights = nvflare_lazy.open(base)
    tied = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    model = accelerate.cpu_offload(empty_qwen(base), execution_device="cpu", state_dict=tied)
    for _ in range(3):
        assert torch.equal(logits(model), expected)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_dispatch_with_lazy_state(base, tmp_path, where):
    """`dispatch_model` and `disk_offload` take lazy tensors, as the state or as the parameters of a model."""
    expected = logits(loaded(base))
    weights = nvflare_lazy.open(base)
    tied = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    devices = {"model.embed_tokens": "cpu", "model.layers": where, "model.norm": "cpu", "lm_head": "cpu"}
    model = empty_qwen(base)
    model.load_state_dict(tied, assign=True)
    buffers = {"model.rotary_emb": "cpu"}
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    dispatched = accelerate.dispatch_model(
        model,
        {**devices, **buffers},
        main_device="cpu",
        state_dict=tied,
        offload_dir=tmp_path / "offload",
        force_hooks=True,
    )
    for _ in range(2):
        assert torch.equal(logits(dispatched), expected)
    model = empty_qwen(base)
    model.load_state_dict(tied, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    offloaded = accelerate.disk_offload(model, tmp_path / "disk", execution_device="cpu")
    for _ in range(2):
        assert torch.equal(logits(offloaded), expected)


@pytest.mark.parametrize("shard", [None, "20KB"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_load_checkpoint_and_dispatch(base, tmp_path, where, shard):
    """Files of this package are loaded and dispatched by accelerate."""
    expected = logits(loaded(base))
    nvflare_lazy.save(nvflare_lazy.open(base), tmp_path / "saved", like=base, max_shard_size=shard)
    devices = {"model.embed_tokens": "cpu", "model.layers": where, "model.norm": "cpu", "lm_head": "cpu"}
    model = qwen()
    model.tie_weights()
    model = accelerate.load_checkpoint_and_dispatch(
        model, str(tmp_path / "saved"), {**devices, "model.rotary_emb": "cpu"}, offload_folder=tmp_path / "offload"
    )
    assert torch.equal(logits(model), expected)


def test_tied_names_are_those_of_the_models(tmp_path):
    """A strict client requires exactly the stored names and the further ones."""
    words = {"vocab_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32}
    t5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    bart = {"vocab_size": 96, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    bart.update(decoder_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=1)
    for name, config, settings in (
        ("OPTForCausalLM", "OPTConfig", {**words, "word_embed_proj_dim": 32, "ffn_dim": 32}),
        ("Qwen2ForSequenceClassification", "Qwen2Config", {**words, "num_key_value_heads": 2, "intermediate_size": 32}),
        ("BertForMaskedLM", "BertConfig", words),
        ("RobertaForMaskedLM", "RobertaConfig", words),
        ("DistilBertForMaskedLM", "DistilBertConfig", {"vocab_size": 96, "dim": 32, "n_layers": 1, "n_heads": 2}),
        ("T5ForConditionalGeneration", "T5Config", t5),
        ("BartForConditionalGeneration", "BartConfig", {**bart, "forced_eos_token_id": None}),
        ("WhisperForConditionalGeneration", "WhisperConfig", bart),
    ):
        model = getattr(transformers, name)(getattr(transformers, config)(**settings))
        model.save_pretrained(tmp_path / name)
        directory = ModelDirectory(tmp_path / name)
        entries = directory.open().entries
        tied = tied_names(directory.config(), entries)
        state = model.state_dict()
        assert state.keys() == entries.keys() | tied.keys(), name
        assert all(state[further].data_ptr() == state[stored].data_ptr() for further, stored in tied.items()), name
