# SPDX-License-Identifier: Apache-2.0
"""Jobs with libraries that an ordinary environment does not have; `test_frameworks.py` runs them in one that does."""

from __future__ import annotations

import numpy as np
import pytest
from nvflare.client.config import ExchangeFormat
from nvflare.recipe.fedavg import FedAvgRecipe as UnifiedFedAvgRecipe
from nvflare.recipe.spec import Recipe

from integration_tests.test_workflows import (
    BOTH_ROUNDS,
    WORKFLOWS,
    accepted_on_disk,
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
