# SPDX-License-Identifier: Apache-2.0
"""Merging LoRA by its definition, its memory, and refused adapters; `test_libraries.py` compares with PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import nvflare_lazy
from benchmarks.measuring import PeakMemory
from nvflare_lazy.cli.program import run
from nvflare_lazy.errors import ModelDirectoryError
from nvflare_lazy.formats.hugging_face import ModelDirectory
from nvflare_lazy.formats.hugging_face.lora import merge_lora

LAYER, PREFIX = "model.layers.0.q_proj", "base_model.model."


def write(path: Path, tensors: dict[str, torch.Tensor], **config: object) -> ModelDirectory:
    path.mkdir()
    name = "adapter_config.json" if "peft_type" in config else "config.json"
    (path / name).write_text(json.dumps(config))
    directory = ModelDirectory(path)
    nvflare_lazy.save(tensors, path, like=directory)
    return directory


def adapter(path: Path, tensors: dict[str, torch.Tensor], **config: object) -> ModelDirectory:
    return write(path, tensors, **{"peft_type": "LORA", "r": 2, "lora_alpha": 3, **config})


@pytest.mark.parametrize("prefix", ["", "model."])
def test_definition(tmp_path, prefix):
    """W + B A alpha / r, found under a prefix; other tensors are unchanged, and trained ones are replaced."""
    weight, a, b, norm = torch.randn(4, 5), torch.randn(2, 5), torch.randn(4, 2), torch.randn(3)
    names = [name.removeprefix(prefix) for name in (f"{LAYER}.weight", "model.norm.weight", "model.other")]
    base = write(tmp_path / "base", dict(zip(names, (weight, torch.ones(3), torch.ones(2)), strict=True)))
    lora = {f"{PREFIX}{LAYER}.lora_A.weight": a, f"{PREFIX}{LAYER}.lora_B.weight": b}
    saved = adapter(tmp_path / "adapter", {**lora, f"{PREFIX}model.norm.weight": norm})
    merged = merge_lora(base, saved)
    assert torch.allclose(merged[names[0]].materialize(), weight + b @ a * 1.5)
    assert torch.equal(merged[names[1]].materialize(), norm)
    assert merged[names[2]].tolist() == [1, 1]
    assert merged.keys() == set(names)


def test_memory(tmp_path):
    """A merged matrix is in memory only while it is read."""
    layers = {f"layers.{number}.weight": torch.zeros(1024, 1024) for number in range(24)}
    base = write(tmp_path / "base", layers)
    parts = {f"{PREFIX}layers.{number}.lora_A.weight": torch.ones(2, 1024) for number in range(24)}
    parts |= {f"{PREFIX}layers.{number}.lora_B.weight": torch.ones(1024, 2) for number in range(24)}
    saved = adapter(tmp_path / "adapter", parts)
    del layers
    with PeakMemory() as memory:
        assert run(["merge-lora", str(base.path), str(saved.path), str(tmp_path / "out")]) == 0
    assert memory.growth < 48 << 20  # of 96
    assert nvflare_lazy.open(tmp_path / "out")["layers.11.weight"][5, 7] == 3.0


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({}, {"peft_type": "IA3"}, "an adapter of type 'IA3', not LORA"),
        ({}, {"use_qalora": True}, "uses use_qalora; merge it with PEFT's"),
        ({}, {"init_lora_weights": "pissa"}, "uses init_lora_weights='pissa'"),
        ({}, {"r": 3}, "has rank 2, expected 3"),
        ({}, {"lora_alpha": None}, "with alpha None"),
        ({}, {"rank_pattern": {"(": 2}}, r"rank_pattern has an invalid expression '\('"),
        ({}, {"use_dora": True}, "use_dora of the configuration does not match"),
        ({f"{LAYER}.lora_B.weight": torch.ones(4, 3)}, {}, "no LoRA of two matrices"),
        ({f"{LAYER}.lora_B.weight": torch.ones(9, 2)}, {}, r"has shape \[9, 5\], the weight has shape \[4, 5\]"),
        ({f"{LAYER}.lora_B.bias": torch.ones(4)}, {}, "its layer does not have one"),
        ({"lm_head.lora_A.weight": torch.ones(2, 5), "lm_head.lora_B.weight": torch.ones(8, 2)}, {}, "a tied layer"),
        ({"norm.weight": torch.ones(7)}, {}, r"'norm.weight' has shape \[7\] in .*, expected \[3\]"),
    ],
)
def test_what_is_refused(tmp_path, tensors, config, message):
    """An adapter that means something else, or does not match, is an error before anything is written."""
    base = write(tmp_path / "base", {f"{LAYER}.weight": torch.ones(4, 5), "norm.weight": torch.ones(3)})
    lora = {f"{LAYER}.lora_A.weight": torch.ones(2, 5), f"{LAYER}.lora_B.weight": torch.ones(4, 2), **tensors}
    with pytest.raises(ModelDirectoryError, match=message):
        merge_lora(
            base, adapter(tmp_path / "adapter", {PREFIX + name: value for name, value in lora.items()}, **config)
        )


def test_quantized_and_missing(tmp_path):
    """A quantized base, a base with integers, and an adapter of another model."""
    lora = {f"{PREFIX}{LAYER}.lora_A.weight": torch.ones(2, 5), f"{PREFIX}{LAYER}.lora_B.weight": torch.ones(4, 2)}
    saved = adapter(tmp_path / "adapter", lora)
    with pytest.raises(ModelDirectoryError, match="quantized"):
        merge_lora(write(tmp_path / "q", {"w": torch.ones(1)}, quantization_config={"bits": 4}), saved)
    with pytest.raises(ModelDirectoryError, match=r"type torch\.int8"):
        merge_lora(write(tmp_path / "i", {f"{LAYER}.weight": torch.ones(4, 5, dtype=torch.int8)}), saved)
    with pytest.raises(ModelDirectoryError, match="no tensor of the result is one of"):
        merge_lora(write(tmp_path / "o", {"w": torch.ones(1)}), saved)
