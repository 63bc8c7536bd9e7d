# SPDX-License-Identifier: Apache-2.0
"""What works with paths works with URLs: aggregation, the commands and the initial checkpoint of a job."""

from __future__ import annotations

import json

import pytest
import torch

import nvflare_lazy
from nvflare_lazy.aggregation import Aggregation
from nvflare_lazy.cli.program import run
from nvflare_lazy.errors import InitialModelError, RemoteError, RemoteFileChangedError, RemoteNotFoundError
from nvflare_lazy.flare import initial_model
from nvflare_lazy.recipes import FedAvgRecipe
from tests.aggregation.test_executors import Counting


@pytest.fixture
def urls(web, tmp_path):
    """Two models of the web server, each with a signature in its URL."""
    for number in (1, 3):
        path = tmp_path / f"{number}.safetensors"
        nvflare_lazy.save({"a": torch.full((1000, 500), float(number)), "b": torch.ones(3)}, path)
        web.files[f"/{number}.safetensors"] = path.read_bytes()
    return [f"{web.url}/{number}.safetensors?signature=secret" for number in (1, 3)]


def test_aggregation(urls, tmp_path):
    result = nvflare_lazy.aggregate({url: nvflare_lazy.open(url) for url in urls}, out=tmp_path / "out.safetensors")
    assert torch.equal(result["a"].materialize(), torch.full((1000, 500), 2.0))


@pytest.mark.parametrize("executor", [None, Counting()], ids=["threads", "executor"])
def test_a_store_that_fails_during_an_aggregation(urls, web, faulty, soon, tmp_path, executor):
    """A store that is down ends the aggregation. It is not the fault of a client, which would be skipped."""
    contributions = {url[-40:]: nvflare_lazy.open(url.replace(web.url, faulty.url)) for url in urls}
    out = nvflare_lazy.save({"old": torch.ones(3)}, tmp_path / "out.safetensors")
    faulty.faults += [503] * 10_000
    with pytest.raises(RemoteError, match=r"cannot read http://127.0.0.1:\d+/\d.safetensors: .*503"):
        nvflare_lazy.aggregate(contributions, out, executor=executor)
    assert [*nvflare_lazy.open(out)] == ["old"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    faulty.faults.clear()
    nvflare_lazy.aggregate(contributions, out, executor=executor)
    assert torch.equal(nvflare_lazy.open(out)["a"].materialize(), torch.full((1000, 500), 2.0))


@pytest.mark.parametrize("executor", [None, Counting()], ids=["threads", "executor"])
@pytest.mark.parametrize("content", [None, b"another file"], ids=["removed", "replaced"])
def test_a_file_that_changes_during_an_aggregation(urls, web, tmp_path, content, executor):
    """A file that was removed or replaced costs its own contribution."""
    contributions = {name: nvflare_lazy.open(url) for name, url in zip("ab", urls, strict=True)}
    del web.files["/1.safetensors"]
    if content is not None:
        web.files["/1.safetensors"] = content
    result = Aggregation(executor=executor).run(contributions, tmp_path / "out.safetensors")
    assert isinstance(result.report.skipped["a"], RemoteFileChangedError if content else RemoteNotFoundError)
    assert torch.equal(result.tensors["a"].materialize(), torch.full((1000, 500), 3.0))


def test_the_aggregate_command(urls, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    assert run(["aggregate", *urls, "--out", str(out), "--json"]) == 0
    assert "secret" not in capsys.readouterr().out
    assert b"secret" not in out.read_bytes()
    assert torch.equal(nvflare_lazy.open(out)["a"].materialize(), torch.full((1000, 500), 2.0))


def test_convert(urls, tmp_path):
    assert run(["convert", urls[0], str(tmp_path / "m.safetensors")]) == 0
    assert nvflare_lazy.open(tmp_path / "m.safetensors")["a"].shape == (1000, 500)


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["plan", "--clients", "2"]])
def test_commands_that_read(urls, command, capsys):
    name, *options = command
    assert run([name, urls[0], *options]) == 0
    assert run([name, urls[0], *options, "--json"]) == 0
    printed = capsys.readouterr()
    assert "secret" not in printed.out + printed.err
    assert json.loads(printed.out.splitlines()[-1])


def test_diff(urls, capsys):
    assert run(["diff", urls[0], urls[0]]) == 0
    assert run(["diff", *urls]) == 1
    assert run(["diff", *urls, "--json"]) == 1
    assert "secret" not in capsys.readouterr().out


def test_a_url_that_does_not_exist(web, capsys):
    assert run(["inspect", f"{web.url}/none?signature=secret"]) == 1
    printed = capsys.readouterr().err
    assert "it does not exist; check the URL" in printed
    assert "secret" not in printed


@pytest.mark.parametrize("argument", ["checkpoint", "initial_ckpt"])
def test_recipes(argument):
    recipe = FedAvgRecipe(
        name="job", min_clients=2, num_rounds=1, train_script="train.py", **{argument: "s3://models/m.safetensors"}
    )
    persistor = recipe._job._deploy_map["server"].app_config.components["persistor"]
    assert persistor.source_ckpt_file_full_name == "s3://models/m.safetensors"


def test_initial_models(urls, web):
    assert torch.equal(initial_model.from_checkpoint(urls[0])["b"].materialize(), torch.ones(3))
    with pytest.raises(InitialModelError, match=r"cannot open the initial checkpoint http://127.0.0.1:\d+/none:"):
        initial_model.from_checkpoint(f"{web.url}/none?signature=secret")
