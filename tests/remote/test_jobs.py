# SPDX-License-Identifier: Apache-2.0
"""A federated job whose initial checkpoint is at a URL, also if the store is killed while the server reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nvflare.recipe.sim_env import SimEnv

import nvflare_lazy
from nvflare_lazy.recipes import FedAvgRecipe
from tests.flare.networks import Small
from tests.remote.s3_on_disk import S3OnDisk
from tests.remote.test_killed_store import kill_at

pytestmark = pytest.mark.slow

TRAIN = """
import nvflare.client as flare

flare.init()
while flare.is_running():
    received = flare.receive()
    if received is None:
        break
    tensors = {name: tensor + 1 for name, tensor in received.params.items()}
    flare.send(flare.FLModel(params=tensors, meta={"NUM_STEPS_CURRENT_ROUND": 1}))
"""


@pytest.fixture
def run(tmp_path):
    """Runs a job of one round with two clients from a checkpoint, and returns the directory of the server."""
    (tmp_path / "train.py").write_text(TRAIN)

    def run(checkpoint: str) -> Path:
        recipe = FedAvgRecipe(
            name="job", checkpoint=checkpoint, min_clients=2, num_rounds=1, train_script=str(tmp_path / "train.py")
        )
        made = recipe.execute(SimEnv(num_clients=2, workspace_root=str(tmp_path / "workspace")))
        return Path(made.get_result()) / "server" / "simulate_job"

    return run


def assert_trained(directory: Path, initial: dict[str, torch.Tensor]) -> None:
    """Every element of the global model is larger by one than in the initial checkpoint."""
    (path,) = directory.rglob("FL_global_model.safetensors")
    trained = nvflare_lazy.open(path)
    assert trained.keys() == initial.keys()
    assert all(torch.equal(trained[name].materialize(), initial[name] + 1) for name in initial)


def test_from_a_web_server(web, run, tmp_path):
    """A job starts from the URL of a web server, and two clients train its model."""
    initial = Small().state_dict()
    web.files["/m.safetensors"] = nvflare_lazy.save(initial, tmp_path / "m.safetensors").read_bytes()
    assert_trained(run(f"{web.url}/m.safetensors"), initial)
    assert ("GET", "/m.safetensors") in {request[:2] for request in web.requests}


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An S3 server that can be killed, with an initial checkpoint."""
    s3fs = pytest.importorskip("s3fs")
    s3fs.S3FileSystem.clear_instance_cache()
    server = S3OnDisk(tmp_path / "s3")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    nvflare_lazy.save(Small().state_dict(), "s3://bucket/initial.safetensors")
    yield server
    server.kill()
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_store_that_is_killed_and_started_again(store, run):
    """The requests of the server are repeated, and the job has the same result."""
    initial = {
        name: tensor.materialize() for name, tensor in nvflare_lazy.open("s3://bucket/initial.safetensors").items()
    }
    killing = kill_at(store, "initial", "GET", back_after=3.0)
    directory = run("s3://bucket/initial.safetensors")
    killing.join()
    assert_trained(directory, initial)


def test_a_store_that_is_killed(store, run, tmp_path, capfd):
    """If it does not come back, the job fails with the URL in the error, and writes no model."""
    killing = kill_at(store, "initial", "GET", back_after=None)
    with pytest.raises(RuntimeError, match="Simulation failed"):
        run("s3://bucket/initial.safetensors")
    killing.join()
    assert not [*(tmp_path / "workspace").rglob("FL_global_model.safetensors")]
    printed = capfd.readouterr()
    assert "cannot open the initial checkpoint s3://bucket/initial.safetensors: cannot " in printed.out + printed.err
