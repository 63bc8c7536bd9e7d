# SPDX-License-Identifier: Apache-2.0
"""Which files of a Hugging Face directory belong next to the weights, and where `save` puts them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import nvflare_lazy
from nvflare_lazy.errors import ModelDirectoryError, SaveError
from nvflare_lazy.formats.hugging_face import ModelDirectory

COMPANIONS = [
    *("config.json", "generation_config.json", "adapter_config.json", "quantize_config.json", "processor_config.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "tokenizer_config.json", "tokenizer.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "target_vocab.json"),
    *("vocab-src.json", "tekken.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "source.spm"),
    *("chat_template.jinja", "chat_template.json"),
]
OTHERS = [
    *("model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin"),
    *("pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack", "model.gguf", "consolidated.00.pth"),
    *("training_args.bin", "optimizer.pt", "trainer_state.json", "all_results.json", "README.md", "modeling_own.py"),
    "checkpoint.json",
]


@pytest.fixture
def like(tmp_path) -> Path:
    """A directory with a file of every name."""
    directory = tmp_path / "like"
    directory.mkdir()
    for name in [*COMPANIONS, *OTHERS]:
        (directory / name).write_text("{}")
    return directory


def test_companions(like):
    """Configurations, tokenizers and templates; no weights, no state of a trainer and no code."""
    assert sorted(map(str, ModelDirectory(like).companions())) == sorted(COMPANIONS)
    (like / "additional_chat_templates").mkdir()
    (like / "additional_chat_templates" / "rag.jinja").write_text("")
    assert Path("additional_chat_templates/rag.jinja") in ModelDirectory(like).companions()


@pytest.mark.parametrize(
    ("auto_map", "code"),
    [
        ({"AutoModel": "modeling_own.Model"}, True),
        ({"AutoTokenizer": ["modeling_own.Slow", None]}, True),
        ({"AutoModel": "owner/other--modeling_own.Model"}, False),
        ({}, False),
    ],
)
def test_code_that_the_configuration_needs(like, auto_map, code):
    """Python files are copied only for classes of this directory."""
    (like / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    assert (Path("modeling_own.py") in ModelDirectory(like).companions()) == code


def test_save_like(like, tmp_path):
    """A new directory has weights and companions; saving into the directory itself, or from links, also works."""
    target = tmp_path / "hub" / "config"
    target.parent.mkdir()
    (like / "config.json").rename(target)
    (like / "config.json").symlink_to(target)
    saved = nvflare_lazy.save({"w": torch.ones(2)}, tmp_path / "a" / "b", like=like)
    assert saved == tmp_path / "a" / "b" / "model.safetensors"
    assert sorted(os.listdir(tmp_path / "a" / "b")) == sorted([*COMPANIONS, "model.safetensors"])
    assert not (tmp_path / "a" / "b" / "config.json").is_symlink()
    assert nvflare_lazy.save({"w": torch.zeros(2)}, like, like=like) == like / "model.safetensors"
    assert nvflare_lazy.open(like / "model.safetensors")["w"].tolist() == [0, 0]


def test_save_makes_a_directory(tmp_path):
    """A path that ends with a slash is a directory, and parents are created."""
    saved = nvflare_lazy.save({"w": torch.ones(2)}, f"{tmp_path}/new/directory/")
    assert saved == tmp_path / "new" / "directory" / "model.safetensors"
    assert nvflare_lazy.open(tmp_path / "new" / "directory")["w"].tolist() == [1, 1]
    with pytest.raises(NotADirectoryError):
        nvflare_lazy.save({"w": torch.ones(2)}, saved / "x" / "y.safetensors")


def test_an_adapter(tmp_path):
    """Only an adapter's configuration: the weights have the adapter's name; otherwise the model's."""
    (tmp_path / "adapter_config.json").write_text("{}")
    assert ModelDirectory(tmp_path).weights_name == "adapter_model.safetensors"
    with pytest.raises(SaveError, match="shards, which PEFT does not load; omit max_shard_size"):
        nvflare_lazy.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "o", like=tmp_path, max_shard_size=12)
    assert not (tmp_path / "o").exists()
    (tmp_path / "config.json").write_text("{}")
    assert ModelDirectory(tmp_path).weights_name == "model.safetensors"
    assert ModelDirectory(tmp_path, adapter=True).weights_name == "adapter_model.safetensors"


def test_what_is_not_one(tmp_path):
    """The error names the missing file."""
    with pytest.raises(ModelDirectoryError, match=r"neither config\.json nor adapter_config\.json"):
        nvflare_lazy.save({}, tmp_path / "out", like=tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ModelDirectoryError, match=r"config\.json is not JSON"):
        nvflare_lazy.save({"w": torch.ones(1)}, tmp_path / "out", like=tmp_path)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ModelDirectoryError, match="without which PEFT loads no adapter"):
        ModelDirectory(tmp_path, adapter=True)
