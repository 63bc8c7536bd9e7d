# SPDX-License-Identifier: Apache-2.0
"""`aggregate` makes one model from many files, reports the result, and names the invalid file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nvflare_lazy.aggregation import rule_names
from nvflare_lazy.cli.aggregate import aggregate


@pytest.fixture
def models(tmp_path):
    """Three checkpoints of different kinds, and what their tensors are."""
    values = [{"w": torch.full((4, 5), float(number)), "n": torch.tensor([number])} for number in (1, 2, 9)]
    save_file(values[0], tmp_path / "a.safetensors")
    torch.save(values[1], tmp_path / "b.pt")
    torch.save({"model": values[2]}, tmp_path / "nested.pt")
    save_file(values[2], tmp_path / "c.safetensors")
    return "a.safetensors", "b.pt", "c.safetensors"


def test_mean(cli, models):
    """Any readable kind; the result is an ordinary file."""
    assert cli("aggregate", *models, "--out", "mean.safetensors") == (
        0,
        "mean.safetensors: mean of 3, 2 tensors, 88 B\n",
        "",
    )
    result = load_file("mean.safetensors")
    assert result["w"].unique().tolist() == [4]
    assert result["n"].tolist() == [4]


def test_weights_go_by_position(cli, models):
    """Though contributors count by name."""
    code, _, _ = cli("aggregate", *reversed(models), "--weights", "0,0,5", "--out", "mean.safetensors")
    assert code == 0
    assert load_file("mean.safetensors")["w"].unique().tolist() == [1]


def test_same_bytes_whatever_the_order(cli, models):
    """The order on the command line does not matter."""
    contents = set()
    for number, order in enumerate([models, models[::-1], (models[1], models[0], models[2])]):
        cli("aggregate", *order, "--out", f"{number}.safetensors", "--threads", number + 1)
        contents.add(Path(f"{number}.safetensors").read_bytes())
    assert len(contents) == 1


def test_rules_and_their_parameters(cli, models):
    """By name; a parameter is a number."""
    assert cli("aggregate", *models, "--rule", "median", "--out", "x.safetensors").code == 0
    assert load_file("x.safetensors")["w"].unique().tolist() == [2]
    assert (
        cli("aggregate", *models, "--rule", "krum", "--rule-arg", "num_byzantine=0", "--out", "y.safetensors").code == 0
    )
    clipped = ("--rule", "clipped_mean", "--rule-arg", "clip_norm=1e9", "--params-type", "diff")
    assert cli("aggregate", *models, *clipped, "--out", "z.safetensors").code == 0
    assert load_file("z.safetensors")["w"].unique().tolist() == [4]


def test_help_names_every_rule(cli):
    """The list is written by hand, since help must not load torch."""
    [option] = [parameter for parameter in aggregate.params if parameter.name == "rule"]
    assert all(name in option.help for name in rule_names())


def test_directory_exclude_and_shards(cli, models, tmp_path):
    """The result in a directory, without some tensors, in several files."""
    (tmp_path / "out").mkdir()
    code, out, _ = cli("aggregate", *models, "--out", "out", "--exclude", "^n$")
    assert (code, out) == (0, f"{os.path.join('out', 'model.safetensors')}: mean of 3, 1 tensor, 80 B\n")
    assert cli("aggregate", *models, "--out", "s.safetensors", "--max-shard-size", "80B").code == 0
    assert (tmp_path / "s.safetensors.index.json").exists()


def test_existing_result(cli, models):
    """Is replaced only if asked to."""
    cli("aggregate", *models, "--out", "a.safetensors", "--force")
    code, _, err = cli("aggregate", *models, "--out", "a.safetensors")
    assert (code, err) == (1, "Error: a.safetensors exists; set --force to replace it\n")


def test_existing_sharded_result(cli, models):
    """Its shards and its index are the result, and its name is the name of its index."""
    code, out, _ = cli("aggregate", *models, "--out", "r.safetensors", "--max-shard-size", "1B")
    assert (code, out) == (0, "r.safetensors.index.json: mean of 3, 2 tensors, 88 B\n")
    code, _, err = cli("aggregate", *models, "--out", "r.safetensors")
    assert (code, err) == (1, "Error: r-00001-of-00002.g2.safetensors exists; set --force to replace it\n")
    assert cli("aggregate", *models, "--out", "r.safetensors", "--force").code == 0


def test_where_the_result_goes(cli, models):
    """A name that ends in .safetensors is a file; another name is a directory, which gets the files of --like."""
    os.mkdir("like")
    Path("like/adapter_config.json").write_text("{}")
    code, out, _ = cli("aggregate", *models, "--out", "new-directory", "--like", "like")
    assert (code, out.partition(":")[0]) == (0, "new-directory/adapter_model.safetensors")
    assert sorted(os.listdir("new-directory")) == ["adapter_config.json", "adapter_model.safetensors"]
    code, _, err = cli("aggregate", *models, "--out", "model.pt")
    assert (code, "end in .safetensors" in err) == (2, True)


def test_who_does_not_fit(cli, models, tmp_path):
    """The error names it, and an option skips it."""
    save_file({"w": torch.zeros(3)}, tmp_path / "d.safetensors")
    code, _, err = cli("aggregate", *models, "d.safetensors", "--out", "x.safetensors")
    assert code == 1
    assert err.startswith(
        "Error: contribution 'd.safetensors' does not match the other contributions: 'w' has shape [3]"
    )
    code, out, err = cli("aggregate", *models, "d.safetensors", "--out", "x.safetensors", "--skip-invalid")
    assert (code, out) == (0, "x.safetensors: mean of 3, 2 tensors, 88 B\n")
    assert err.startswith("Skipped d.safetensors: contribution 'd.safetensors' does not match the other")


def test_who_cannot_be_read(cli, models, tmp_path, monkeypatch):
    """A skipped input is reported to the user and, by exit code 1 in spite of a result, to scripts."""
    from nvflare_lazy.aggregation._engine.tile_io import InputVector
    from nvflare_lazy.errors import SourceError

    read = InputVector.read

    def fail(vector, start, buffer):
        if "b.pt" in vector._sources[0].describe():
            raise SourceError("b.pt: the disk broke")
        read(vector, start, buffer)

    monkeypatch.setattr(InputVector, "read", fail)
    code, out, err = cli("aggregate", *models, "--out", "x.safetensors")
    assert (code, out) == (1, "x.safetensors: mean of 2, 2 tensors, 88 B\n")
    assert err == "Skipped b.pt: b.pt: the disk broke\n"
    assert load_file("x.safetensors")["w"].unique().tolist() == [5]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "Missing option '--out'"),
        (("--out", "x.safetensors", "--weights", "1,2"), 2, "--weights has 2 numbers for 3 INPUTS"),
        (("--out", "x.safetensors", "--weights", "1,2,x"), 2, "Invalid weights '1,2,x'"),
        (("--out", "x.safetensors", "--weights", "1,2,-1"), 1, "the weight of 'c.safetensors' must be zero or"),
        (("--out", "x.safetensors", "--rule", "best"), 2, "unknown aggregation rule 'best'"),
        (("--out", "x.safetensors", "--rule", "krum"), 1, "requires at least 5 contributors, got 3"),
        (("--out", "x.safetensors", "--rule", "krum", "--rule-arg", "f=1"), 2, "unexpected keyword argument 'f'"),
        (("--out", "x.safetensors", "--rule-arg", "f"), 2, "Invalid argument 'f': expected NAME=VALUE"),
        (("--out", "x.safetensors", "--rule-arg", "f=many"), 2, "Invalid value 'many': expected a number"),
        (
            ("--out", "x.safetensors", "--rule", "clipped_mean", "--rule-arg", "clip_norm=1"),
            1,
            "pass the global model as reference",
        ),
        (("--out", "x.safetensors", "--memory-budget", "1KiB"), 1, "a memory budget of 1.0 KiB is too small"),
        (("--out", "x.safetensors", "--exclude", "("), 2, "Invalid regular expression"),
        (("a.safetensors", "--out", "x.safetensors"), 2, "The same INPUT is given twice"),
        (("gone.safetensors", "--out", "x.safetensors"), 1, "gone.safetensors: No such file"),
    ],
)
def test_mistakes(cli, models, tmp_path, arguments, code, message):
    """Each is told in a line, and nothing is written."""
    before = {*os.listdir(tmp_path)}
    result = cli("aggregate", *models, *arguments)
    assert result.code == code
    assert message in result.err
    assert "Traceback" not in result.err
    assert {*os.listdir(tmp_path)} == before


@pytest.mark.slow
def test_worker_processes(cli, models):
    """Processes write the same bytes, with the same report and the same errors."""
    one = cli("aggregate", *models, "--out", "one.safetensors")
    parts = cli("aggregate", *models, "--workers", 2, "--out", "parts.safetensors")
    assert (parts.code, parts.out.replace("parts.", "one."), parts.err) == one
    assert Path("parts.safetensors").read_bytes() == Path("one.safetensors").read_bytes()
    Path(models[0]).write_bytes(Path(models[0]).read_bytes()[:-1])
    assert cli("aggregate", *models, "--workers", 2, "--out", "x.safetensors").code == 1
