# SPDX-License-Identifier: Apache-2.0
"""Jobs with libraries that an ordinary environment does not have; `test_frameworks.py` runs them in one that does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import ExchangeFormat
from nvflare.recipe import add_experiment_tracking
from nvflare.recipe.fedavg import FedAvgRecipe as UnifiedFedAvgRecipe
from nvflare.recipe.spec import Recipe

from benchmarks.fl_job import poc
from integration_tests.conftest import in_deployment, records, server_app
from integration_tests.recipe_job import RecipeJob
from integration_tests.test_workflows import (
    BOTH_ROUNDS,
    HELLO,
    TRAIN,
    WORKFLOWS,
    accepted_on_disk,
    check_model,
    net,  # noqa: F401 (a fixture)
    stock_and_lazy,  # noqa: F401 (a fixture)
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # those of the libraries are not ours
]


def test_tensorflow(stock_and_lazy, monkeypatch):  # noqa: F811
    """A Keras model, whose layers are lists of arrays in the script and lazy arrays at the server."""
    pytest.importorskip("tensorflow")
    from keras_model import KerasNet
    from nvflare.app_opt.tf.recipes.fedavg import FedAvgRecipe as KerasFedAvgRecipe

    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")

    def make() -> Recipe:
        return KerasFedAvgRecipe(model=KerasNet(), min_clients=2, train_script=str(WORKFLOWS / "layers_train.py"))

    stock, lazy = stock_and_lazy(make, 1, on_disk=4)
    expected, found = KerasNet(), KerasNet()
    for model, result in ((expected, stock), (found, lazy)):
        model.build((None, 4))
        model.load_weights(str(next(result.workspace.glob("server/**/tf_model.weights.h5"))))
    assert all(map(np.array_equal, expected.get_weights(), found.get_weights()))
    assert accepted_on_disk(lazy) == BOTH_ROUNDS


def test_scikit_learn(stock_and_lazy):  # noqa: F811
    """The first global model has no tensors, so that results cannot be compared with it."""
    pytest.importorskip("sklearn")
    import joblib
    from nvflare.app_opt.sklearn import SklearnFedAvgRecipe

    def make() -> Recipe:
        return SklearnFedAvgRecipe(
            min_clients=2, model_params={"n_classes": 2}, train_script=str(WORKFLOWS / "linear_train.py")
        )

    stock, lazy = stock_and_lazy(make, 1, on_disk=4)
    expected, found = (
        joblib.load(next(result.workspace.glob("server/**/model_param.joblib"))) for result in (stock, lazy)
    )
    assert expected.keys() == found.keys()
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert accepted_on_disk(lazy) == BOTH_ROUNDS


def test_jax(stock_and_lazy, tmp_path):  # noqa: F811
    """All parameters as one array."""
    pytest.importorskip("jax")
    np.save(tmp_path / "initial.npy", np.arange(1000, dtype=np.float32))

    def make() -> Recipe:
        return UnifiedFedAvgRecipe(
            name="jax",
            min_clients=2,
            initial_ckpt=str(tmp_path / "initial.npy"),
            train_script=str(WORKFLOWS / "jax_train.py"),
            framework="numpy",
            server_expected_format=ExchangeFormat.NUMPY,
        )

    stock, lazy = stock_and_lazy(make, 1, on_disk=4)
    expected, found = (np.load(next(result.workspace.glob("server/**/server.npy"))) for result in (stock, lazy))
    assert np.array_equal(expected, found)
    assert accepted_on_disk(lazy) == BOTH_ROUNDS


@pytest.mark.parametrize("level", [1, 3])
def test_lightning_with_experiment_tracking(stock_and_lazy, level):  # noqa: F811
    """A patched trainer gives what it gives without; TensorBoard gets its metrics and ours."""
    pytest.importorskip("pytorch_lightning")
    from lightning_net import LightningNet
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def make() -> Recipe:
        recipe = FedAvgRecipe(
            name="tracked",
            model=LightningNet(),
            min_clients=2,
            num_rounds=2,
            train_script=str(WORKFLOWS / "lightning_train.py"),
            server_expected_format="pytorch",
        )
        recipe.add_server_file(str(HELLO / "net.py"))
        recipe.add_client_file(str(HELLO / "net.py"))
        add_experiment_tracking(recipe, "tensorboard")
        return recipe

    stock, lazy = stock_and_lazy(make, level, on_disk=4)
    check_model(stock, lazy, exact=level == 1)
    assert accepted_on_disk(lazy) == BOTH_ROUNDS
    tags = set()
    for path in lazy.server_run_dir.glob("tb_events/*"):
        events = EventAccumulator(str(path))
        events.Reload()
        tags |= {*events.Tags()["scalars"]}
    assert tags >= {"accuracy", "nvflare_lazy/received_bytes", "nvflare_lazy/memory_bytes"}


@in_deployment
def test_homomorphic_encryption(tmp_path, net, monkeypatch):  # noqa: F811
    """Encrypted results are not tensors: the job works as without this package, with one warning."""
    pytest.importorskip("tenseal")
    import yaml
    from nvflare.app_opt.pt.recipes.fedavg_he import FedAvgRecipeWithHE
    from nvflare.tool.poc import poc_commands

    prepared = poc_commands.local_provision

    def with_keys(*arguments: Any, project_conf_path: str, **others: Any) -> Any:
        project = yaml.safe_load(Path(project_conf_path).read_text())
        place = next(i for i, builder in enumerate(project["builders"]) if builder["path"].endswith("CertBuilder"))
        project["builders"].insert(place, {"path": "nvflare.lighter.impl.he.HEBuilder", "args": {}})
        Path(project_conf_path).write_text(yaml.safe_dump(project))
        return prepared(*arguments, project_conf_path=project_conf_path, **others)

    monkeypatch.setattr(poc_commands, "local_provision", with_keys)
    recipe = FedAvgRecipeWithHE(model=net.Net(16), min_clients=2, train_script=TRAIN)
    config = {"id": "offload", "path": "nvflare_lazy.flare.TensorOffload", "args": {}}
    job = RecipeJob(recipe=recipe, watched=False, components=(config,))
    result = poc.run_in_poc(job, tmp_path, timeout=300)
    assert result.ok, result.output[-3000:]
    [warning] = [line for line in result.server_log.splitlines() if "Results are in memory, not on disk" in line]
    assert "encrypted" in warning
    assert " - ERROR - " not in result.server_log
    assert [part["aggregated"] for part in records(result, "round")] == [["site-1", "site-2"]] * 2
    assert (server_app(result) / "FL_global_model.pt").exists()
