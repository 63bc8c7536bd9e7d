# SPDX-License-Identifier: Apache-2.0
"""Commands write to URLs, and refuse to replace a checkpoint there without `--force`."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load, load_file, save_file

import nvflare_lazy
from nvflare_lazy.errors import ModelDirectoryError


def test_convert(cli, memory, tensors, tmp_path) -> None:
    """A file, or a directory of shards; without --force, nothing is replaced."""
    save_file(tensors, tmp_path / "in")
    assert cli("convert", "in", "memory://a/out.safetensors")[:2] == (
        0,
        "memory://a/out.safetensors: 4 tensors, 25.1 KiB\n",
    )
    assert load(memory.cat("/a/out.safetensors")).keys() == tensors.keys()
    code, out, err = cli("convert", "in", "memory://a/out.safetensors")
    assert (code, out) == (1, "")
    assert "memory://a/out.safetensors exists; set --force to replace it" in err
    code, out, _ = cli("convert", "in", "memory://a/out.safetensors", "--force", "--max-shard-size", "5KB", "--json")
    assert json.loads(out)["path"] == "memory://a/out.safetensors.index.json"
    assert not memory.exists("/a/out.safetensors")
    code, out, err = cli("convert", "in", "https://user:secret@localhost/out.safetensors")
    assert (code, out) == (1, "")
    assert "secret" not in err


def test_export(cli, memory, tensors, tmp_path) -> None:
    """The configuration is uploaded with the weights."""
    save_file(tensors, tmp_path / "in")
    (tmp_path / "base").mkdir()
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text("{}")
    code, out, _ = cli("export", "in", "--base", "base", "--out", "memory://trained")
    assert code == 0
    assert out.startswith("memory://trained/model.safetensors: ")
    assert memory.cat("/trained/config.json") == b"{}"
    assert (
        "memory://trained/config.json exists" in cli("export", "in", "--base", "base", "--out", "memory://trained").err
    )


def test_export_from_a_url(cli, memory, tensors, tmp_path) -> None:
    """The result of a job can be at a URL."""
    (tmp_path / "base").mkdir()
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text("{}")
    memory.pipe_file("/job/result.safetensors", (tmp_path / "base" / "model.safetensors").read_bytes())
    code, *_ = cli("export", "memory://job/result.safetensors", "--base", "base", "--out", "out")
    assert code == 0
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "in", "--out", "out", "--base"),
        ("convert", "in", "out.safetensors", "--like"),
        ("aggregate", "in", "in2", "--out", "out", "--like"),
        ("merge-lora", "{}", ".", "out"),
        ("merge-lora", ".", "{}", "out"),
    ],
    ids=" ".join,
)
def test_directories_that_must_be_local(cli, tensors, tmp_path, arguments) -> None:
    """A Hugging Face directory at a URL is refused, with the remedy and without the secrets of the URL."""
    save_file(tensors, tmp_path / "in")
    url = "https://user:secret@localhost/base?key=secret"
    given = [url if argument == "{}" else argument for argument in arguments]
    code, out, err = cli(*given, *(() if url in given else (url,)))
    assert (code, out) == (2, "")
    assert "https://localhost/base is a URL; download the directory, and give its local path." in " ".join(err.split())
    assert "secret" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_like_at_a_url(tensors, tmp_path) -> None:
    """The argument of the library is refused in the same way."""
    with pytest.raises(ModelDirectoryError, match="s3://models/base is a URL; download the directory"):
        nvflare_lazy.save(tensors, tmp_path / "out", like="s3://models/base")


def test_aggregate(cli, memory, tmp_path) -> None:
    """The result is named by its URL, sharded or not."""
    for name, value in (("a", 1.0), ("b", 3.0)):
        save_file({"w": torch.full((100,), value), "v": torch.full((100,), value)}, tmp_path / name)
    assert cli("aggregate", "a", "b", "--out", "memory://m")[:2] == (
        0,
        "memory://m/model.safetensors: mean of 2, 2 tensors, 800 B\n",
    )
    assert load(memory.cat("/m/model.safetensors"))["w"].unique().tolist() == [2.0]
    options = ("--out", "memory://m", "--force", "--max-shard-size", "400")
    assert cli("aggregate", "a", "b", *options).out.startswith("memory://m/model.safetensors.index.json: ")
