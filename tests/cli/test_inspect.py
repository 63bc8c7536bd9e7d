# SPDX-License-Identifier: Apache-2.0
"""`inspect` lists the contents of a checkpoint of any kind and any size, and reads no tensor for it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.cli.sparse import write_sparse

TABLE = """\
NAME          DTYPE  SHAPE          SIZE
steps         I64    []              8 B
embed.weight  F32    [100, 64]  25.0 KiB
norm          BF16   [64]          128 B
mask          BOOL   [3]             3 B

DTYPE  TENSORS  ELEMENTS      SIZE
F32          1     6,400  25.0 KiB
BF16         1        64     128 B
I64          1         1       8 B
BOOL         1         3       3 B
total        4     6,468  25.1 KiB

metadata
  format: pt
"""


def test_table(cli, model):
    """Every tensor in the order of the file, what they add up to, and the metadata."""
    assert cli("inspect", model) == (0, TABLE, "")


def test_json(cli, model, tensors):
    """The same as one JSON document."""
    code, out, _ = cli("inspect", "--json", model)
    document = json.loads(out)
    assert code == 0
    assert document["file"] == str(model)
    assert document["metadata"] == {"format": "pt"}
    assert document["extras"] == {}
    assert document["total"] == {"tensors": 4, "elements": 6468, "nbytes": 25739}
    assert document["dtypes"]["BF16"] == {"tensors": 1, "elements": 64, "nbytes": 128}
    listed = {entry["name"]: entry for entry in document["tensors"]}
    assert listed.keys() == tensors.keys()
    assert listed["embed.weight"] == {
        "name": "embed.weight",
        "dtype": "F32",
        "shape": [100, 64],
        "nbytes": 25600,
    }


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_pytorch(cli, tmp_path, tensors, kind):
    """PyTorch checkpoints look the same, in the order in which they were saved, including other objects."""
    content = {"model": {**tensors, "tied": tensors["norm"]}, "epoch": 3, "args": {"name": "run\x1b[31m"}}
    torch.save(content, tmp_path / "file", _use_new_zipfile_serialization=kind == "zip")
    code, out, _ = cli("inspect", "file")
    assert code == 0
    lines = out.splitlines()
    names = [line.split()[0] for line in lines[1:6]]
    assert names == ["model.embed.weight", "model.norm", "model.steps", "model.mask", "model.tied"]
    assert "  epoch: 3" in lines
    assert "  args: {'name': 'run\\x1b[31m'}" in lines


def test_section(cli, training):
    """One part of a training checkpoint, by its own names."""
    code, out, _ = cli("inspect", "--section", "model", "--json", training)
    assert code == 0
    assert {entry["name"] for entry in json.loads(out)["tensors"]} == {"embed.weight", "norm", "steps", "mask"}


def test_extras_as_json(cli, tmp_path):
    """What JSON has no form for is put into words; the document stays valid."""
    torch.save({"w": torch.ones(1), "lr": math.nan, "betas": (0.9, 0.99), "steps": {1: "a"}}, tmp_path / "file.pt")
    document = json.loads(cli("inspect", "--json", "file.pt").out, parse_constant=pytest.fail)
    assert document["extras"] == {"lr": "nan", "betas": [0.9, 0.99], "steps": {"1": "a"}}


def test_extras_that_are_not_loaded_are_named(cli, tmp_path):
    """Objects that are more than plain data appear by the names of their classes, in the table and as JSON."""
    torch.save({"w": torch.zeros(2), "loss": [np.float64(0.5)]}, tmp_path / "model.pt")
    name = "multiarray.scalar, not loaded>"
    assert name in cli("inspect", tmp_path / "model.pt").out
    assert name in json.loads(cli("inspect", tmp_path / "model.pt", "--json").out)["extras"]["loss"][0]


def test_match(cli, model):
    """Only what matches is listed and counted."""
    code, out, _ = cli("inspect", "--match", "^(embed|mask)", model)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["embed.weight", "mask"]
    assert "2 of 4 tensors match" in out
    assert "total        2     6,403" in out


def test_match_nothing(cli, model):
    """No match is an answer, not an error."""
    code, out, _ = cli("inspect", "--match", "nothing", model)
    assert code == 0
    assert out.startswith("0 of 4 tensors match\n")


def test_wrong_regular_expression(cli, model):
    """A misuse, told before the file is opened."""
    code, out, err = cli("inspect", "--match", "(", model)
    assert (code, out) == (2, "")
    assert "Invalid regular expression '(': missing )" in err


def test_names_cannot_command_the_terminal(cli, tmp_path):
    """Escape sequences in names and metadata are shown, not obeyed; other scripts keep the columns aligned."""
    save_file(
        {"\x1b]0;owned\x07": torch.ones(1), "埋め込み": torch.ones(2)}, tmp_path / "f", metadata={"a\nb": "\x9b1m"}
    )
    code, out, _ = cli("inspect", "f")
    assert code == 0
    assert not {"\x1b", "\x07", "\x9b"} & set(out)
    assert out.splitlines()[:3] == [
        "NAME              DTYPE  SHAPE  SIZE",
        "\\x1b]0;owned\\x07  F32    [1]     4 B",
        "埋め込み          F32    [2]     8 B",
    ]
    assert "  a\\nb: \\x9b1m" in out


def test_provenance(cli, model):
    """A result has the contributors, their weights and the rule, apart from other metadata."""
    cli("aggregate", model, "--out", "mean.safetensors")
    out = cli("inspect", "mean.safetensors").out
    before, after = out.split("\nmetadata\n")
    assert "\nprovenance\n" in before
    assert f"  contributors: ['{model}']"[:60] in before
    assert after == "  format: pt\n"


@pytest.mark.parametrize("text", ["[" * 100_000, "no JSON", "[1]", '{"job": "\x1b[31m", "round": [[[[[[[]]]]]]]}'])
def test_crafted_provenance(cli, tmp_path, text):
    """Metadata of any content are shown, and never break the command."""
    save_file({"w": torch.ones(1)}, tmp_path / "f", metadata={"nvflare_lazy.job": text})
    code, out, err = cli("inspect", "f")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert cli("inspect", "f", "--json").code == 0


def test_long_metadata_is_cut(cli, tmp_path):
    """A training script that was stored as metadata does not flood the terminal."""
    save_file({"w": torch.ones(1)}, tmp_path / "f", metadata={"script": "x" * 100_000})
    assert max(map(len, cli("inspect", "f").out.splitlines())) < 300


def test_hundred_gigabytes(cli, tmp_path, rchar):
    """A file of 100 GiB costs its header, and no more."""
    write_sparse(tmp_path / "big.safetensors", {f"layers.{i}.w": ("BF16", (4, 1 << 27)) for i in range(100)})
    cli("inspect", "big.safetensors")
    before = rchar()
    code, out, _ = cli("inspect", "big.safetensors")
    assert rchar() - before < 1 << 20
    assert code == 0
    assert "total      100  53,687,091,200  100.0 GiB" in out


def test_all_dtypes(cli, tmp_path):
    """Types that torch cannot hold are listed all the same, and packed ones by the format's count of elements."""
    write_sparse(tmp_path / "f", {"f4": ("F4", (4, 8)), "f6": ("F6_E2M3", (4, 4)), "f8": ("F8_E8M0", (3,))})
    code, out, _ = cli("inspect", "f")
    assert code == 0
    assert {tuple(line.split(maxsplit=2)) for line in out.splitlines()[1:4]} == {
        ("f4", "F4", "[4, 8]  16 B"),
        ("f6", "F6_E2M3", "[4, 4]  12 B"),
        ("f8", "F8_E8M0", "[3]      3 B"),
    }


def test_type_without_a_safetensors_name(cli, tmp_path):
    """Such a type has torch's name for it."""
    torch.save({"z": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "f.pt")
    assert "z     complex128  [2]    32 B" in cli("inspect", "f.pt").out


def test_sharded(cli, tmp_path, model):
    """An index, the directory it is in, and the file show the same tensors."""
    assert cli("convert", model, tmp_path / "out.safetensors", "--max-shard-size", "20KB").code == 0
    whole = json.loads(cli("inspect", "--json", model).out)
    sharded = json.loads(cli("inspect", "--json", "out.safetensors.index.json").out)
    assert sorted(sharded["tensors"], key=str) == sorted(whole["tensors"], key=str)
    assert sharded["total"] == whole["total"]
