# SPDX-License-Identifier: Apache-2.0
"""`diff` lists the differences of two checkpoints of any format, and its exit code is 1 if there are any."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import save_file

TABLE = """\
TENSOR        DTYPE        SHAPE       DIFFERENT   MAX ABS  MEAN ABS   MAX REL  MEAN REL       ULPS    COSINE
mask          BOOL -> F32  [3] -> [4]          0         -         -         -         -          -         -
embed.weight  F32          [100, 64]           1  1.00e+00  1.56e-04  5.00e-01  7.81e-05  8,388,608  0.999922
norm          BF16 -> F32  [64]                0  0.00e+00  0.00e+00  0.00e+00  0.00e+00          0  1.000000
Only in a.safetensors: steps
Only in b.safetensors: new
3 tensors compared, 3 different; only in A: 1, only in B: 1
"""


@pytest.fixture
def pair(tmp_path):
    a = {"embed.weight": torch.ones(100, 64), "norm": torch.ones(64).bfloat16(), "mask": torch.ones(3).bool()}
    b = {"embed.weight": torch.ones(100, 64), "norm": torch.ones(64), "mask": torch.ones(4)}
    b["embed.weight"][3, 4] = 2
    save_file({**a, "steps": torch.tensor(7)}, tmp_path / "a.safetensors")
    save_file({**b, "new": torch.tensor(7)}, tmp_path / "b.safetensors")


def test_table(cli, pair):
    """Differences of structure first, then the largest absolute differences, and a summary."""
    assert cli("diff", "a.safetensors", "b.safetensors") == (1, TABLE, "")


def test_the_same(cli, model):
    """One line, and the exit code 0."""
    line = "4 tensors compared, 0 different; only in A: 0, only in B: 0\n"
    assert cli("diff", model, model) == (0, line, "")


def test_formats(cli, model, training, tensors, tmp_path):
    """Any formats are compared with each other; a section is used where there is one."""
    torch.save(tensors, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    cli("convert", model, "sharded.safetensors", "--max-shard-size", "20KB")
    cli("convert", model, "hf/")
    for other in ("legacy.pt", "sharded.safetensors.index.json", "hf"):
        assert cli("diff", model, other).code == 0
    assert cli("diff", "training.pt", model, "--section", "model").code == 0
    assert cli("diff", "training.pt", model).code == 1
    code, out, err = cli("diff", model, model, "--section", "model")
    assert (code, out) == (1, "")
    assert "has no sections" in err


def test_tolerance(cli, pair):
    """Differences within it are accepted, and then types may differ."""
    arguments = ("diff", "a.safetensors", "b.safetensors", "--match", "embed|norm", "--tolerance")
    for tolerance, code in (("1", 0), ("atol=0.9", 1), ("rtol=0.5", 0), ("rtol=0.4,atol=0.1", 1), ("rtol=0.4,1", 0)):
        assert cli(*arguments, tolerance).code == code
    for wrong in ("x", "-1", "nan", "inf", "ulps=3", ""):
        assert cli(*arguments, wrong).code == 2


def test_json(cli, pair):
    """All tensors with all numbers, the largest difference first."""
    code, out, err = cli("diff", "a.safetensors", "b.safetensors", "--json", "--tolerance", "1e-3")
    document = json.loads(out)
    assert (code, err, document["same"], document["tolerance"]) == (1, "", False, {"atol": 0.001})
    assert (document["only_in_a"], document["only_in_b"]) == (["steps"], ["new"])
    assert [(tensor["name"], tensor["same"]) for tensor in document["tensors"]] == [
        *(("mask", False), ("embed.weight", False), ("norm", True)),
    ]
    assert document["tensors"][1]["max_abs"] == 1.0


def test_non_finite(cli, tmp_path):
    """NaN and infinite values add two columns, and their tensors are listed first."""
    save_file({"a": torch.tensor([math.nan, 1.0]), "b": torch.tensor([1.0, 1.0])}, tmp_path / "a")
    save_file({"a": torch.tensor([math.inf, 1.0]), "b": torch.tensor([9.0, 1.0])}, tmp_path / "b")
    lines = cli("diff", "a", "b").out.splitlines()
    assert lines[0].split()[-2:] == ["NAN", "INF"]
    assert lines[1].split()[0] == "a"
    assert lines[1].endswith("1 -> 0  0 -> 1")


def test_many_differences(cli, tmp_path):
    """The largest ones are listed, and the number of the others."""
    for name, value in (("a", 0.0), ("b", 1.0)):
        save_file({f"w{i}": torch.full((2,), value * i) for i in range(1, 40)}, tmp_path / name)
    lines = cli("diff", "a", "b").out.splitlines()
    assert (len(lines), lines[1].split()[0]) == (23, "w39")
    assert lines[21] == "... and 19 more, which --json lists"


def test_names_cannot_command_the_terminal(cli, tmp_path):
    """Escape sequences in names are shown as text."""
    save_file({"\x1b[2J": torch.ones(1), "\x1b[31m": torch.ones(1)}, tmp_path / "a")
    save_file({"\x1b[2J": torch.zeros(1)}, tmp_path / "b")
    code, out, _ = cli("diff", "a", "b")
    assert code == 1
    assert "\x1b" not in out


def test_errors(cli, model):
    """A file that cannot be read is an error in one line."""
    assert cli("diff", model, "missing") == (1, "", "Error: missing: No such file or directory\n")
    assert cli("diff", model).code == 2
    nothing = cli("diff", model, model, "--match", "typo")
    assert nothing.code == 2
    assert "--match 'typo' matches no tensor." in nothing.err
