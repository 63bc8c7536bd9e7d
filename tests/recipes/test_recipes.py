# SPDX-License-Identifier: Apache-2.0
"""The recipes take what NVFlare's take, and the jobs they make name classes and never hold a model."""

from __future__ import annotations

import inspect
import json

import pytest
from nvflare.app_opt.pt.recipes import FedAvgRecipe as StockFedAvg
from nvflare.app_opt.pt.recipes.fedopt import FedOptRecipe as StockFedOpt
from nvflare.app_opt.pt.recipes.fedprox import FedProxRecipe as StockFedProx
from nvflare.app_opt.pt.recipes.scaffold import ScaffoldRecipe as StockScaffold
from nvflare.app_opt.pt.recipes.swarm import SwarmLearningRecipe as StockSwarm
from nvflare.client.config import TransferType
from nvflare.recipe.utils import add_cross_site_evaluation, set_per_site_config

from nvflare_lazy import save
from nvflare_lazy.recipes import FedAvgRecipe, FedOptRecipe, FedProxRecipe, ScaffoldRecipe, SwarmLearningRecipe
from tests.flare.networks import Small

PAIRS = [
    (FedAvgRecipe, StockFedAvg),
    (FedOptRecipe, StockFedOpt),
    (FedProxRecipe, StockFedProx),
    (ScaffoldRecipe, StockScaffold),
]


@pytest.fixture
def script(tmp_path) -> str:
    (tmp_path / "train.py").write_text("import nvflare.client as flare\n\nflare.init()\n")
    return str(tmp_path / "train.py")


@pytest.fixture
def export(tmp_path):
    """Writes a recipe's job and returns the configuration of one side."""

    def export(recipe, side="server", app="app") -> dict:
        recipe.export(str(tmp_path / "jobs"))
        config = tmp_path / "jobs" / recipe.name / app / "config" / f"config_fed_{side}.json"
        return json.loads(config.read_text())

    return export


def component(config: dict, name: str) -> dict:
    (found,) = [part for part in config["components"] if part["path"].endswith(f".{name}")]
    return found.get("args", {})


def controller(config: dict) -> dict:
    (workflow,) = config["workflows"]
    return workflow


def arguments_of(stock: type) -> dict[str, object]:
    """Return every argument of an NVFlare recipe, with its default."""
    found = {}
    for kind in reversed(stock.__mro__[:-1]):
        for name, parameter in inspect.signature(kind.__init__).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and kind is stock:
                found[name] = None if parameter.default is parameter.empty else parameter.default
    return found


@pytest.mark.parametrize(("ours", "stock"), PAIRS, ids=lambda kind: kind.__module__.partition(".")[0])
def test_every_argument_of_nvflares_recipe_is_taken(ours, stock, script, export):
    """All of them by name, each with the value NVFlare has for it by default; the job names our components."""
    given = arguments_of(stock) | {"model": Small(), "train_script": script, "min_clients": 2, "num_rounds": 2}
    assert len(given) > 5
    config = export(ours(**given))
    assert controller(config)["path"].startswith("nvflare_lazy.flare.")
    assert component(config, "LazyModelPersistor")["model"] == {
        "path": "tests.flare.networks.Small",
        "args": {},
        "config_type": "dict",
    }
    component(config, "TensorOffload")


def test_what_ours_take_beyond_that_arrives(script, export):
    """Rule, checkpoint, scratch and memory are where the components look for them, on both sides."""
    recipe = FedAvgRecipe(
        name="more",
        checkpoint="/models/start",
        checkpoint_dir="/data/checkpoints",
        keep_rounds=5,
        save_pytorch=True,
        rule="trimmed_mean",
        rule_args={"num_byzantine": 1},
        executor={"name": "ray", "address": "auto"},
        scratch_dir="/data/scratch",
        scratch_quota="10GiB",
        memory_budget="96MiB",
        min_responses=3,
        wait_time_after_min_received=7,
        task_timeout=11,
        min_clients=4,
        num_rounds=2,
        train_script=script,
    )
    config = export(recipe)
    persistor = component(config, "LazyModelPersistor")
    assert persistor["source_ckpt_file_full_name"] == "/models/start"
    assert (persistor["checkpoint_dir"], persistor["keep_rounds"], persistor["save_pytorch"]) == (
        "/data/checkpoints",
        5,
        True,
    )
    assert persistor["allow_numpy_conversion"] is False
    offload = {"scratch_dir": "/data/scratch", "scratch_quota": "10GiB", "memory_budget": "96MiB"}
    assert component(config, "TensorOffload").items() >= offload.items()
    assert component(export(recipe, "client"), "TensorOffload").items() >= offload.items()
    args = controller(config)["args"]
    assert (args["min_responses"], args["wait_time_after_min_received"], args["task_timeout"]) == (3, 7, 11)
    assert args["aggregator"]["args"]["rule"] == "trimmed_mean"
    assert args["aggregator"]["args"]["rule_args"] == {"num_byzantine": 1}
    assert args["aggregator"]["args"]["executor"] == {"name": "ray", "address": "auto"}
    component(config, "LazyModelLocator")


@pytest.mark.parametrize("argument", ["checkpoint", "initial_ckpt"])
@pytest.mark.parametrize("recipe", [FedAvgRecipe, ScaffoldRecipe])
def test_a_checkpoint_beside_the_script_travels(script, export, tmp_path, monkeypatch, recipe, argument):
    """As with NVFlare's recipes: a relative path is a file here, and the persistor finds it in the job."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    save(Small().state_dict(), tmp_path / "models" / "start.safetensors")
    given = {argument: "models/start.safetensors"}
    config = export(recipe(name="begun", min_clients=2, num_rounds=1, train_script=script, **given))
    assert component(config, "LazyModelPersistor")["source_ckpt_file_full_name"] == "start.safetensors"
    assert (tmp_path / "jobs" / "begun" / "app" / "custom" / "start.safetensors").is_file()


def test_clients_without_the_package(script, export):
    """Their configuration does not name it, and the server's does."""
    recipe = FedAvgRecipe(model=Small(), offload_clients=False, min_clients=2, num_rounds=1, train_script=script)
    assert "nvflare_lazy" not in json.dumps(export(recipe, "client"))
    assert "nvflare_lazy" in json.dumps(export(recipe))


def test_swarm_learning(script, export):
    """NVFlare's arguments with their defaults; our components are on the clients."""
    given = {name: part.default for name, part in inspect.signature(StockSwarm).parameters.items()}
    given |= {"name": "swarm", "model": Small(), "num_rounds": 2, "train_script": script, "min_clients": 2}
    ours = {"rule": "median", "checkpoint": "/models/start", "save_pytorch": True, "scratch_quota": "1GiB"}
    recipe = SwarmLearningRecipe(**given | {"learn_task_timeout": 77, "expected_data_kind": "WEIGHT_DIFF"} | ours)
    config = export(recipe, "client")
    assert component(config, "TensorOffload")["scratch_quota"] == "1GiB"
    assert component(config, "LazyAggregator").items() >= {"rule": "median", "params_type": "DIFF"}.items()
    persistor = component(config, "LazyModelPersistor")
    assert persistor["model"]["path"] == "tests.flare.networks.Small"
    assert (persistor["source_ckpt_file_full_name"], persistor["save_pytorch"]) == ("/models/start", True)
    swarm = config["executors"][0]["executor"]
    assert swarm["path"].endswith(".LazySwarmClientController")
    assert swarm["args"].items() >= {"learn_task_timeout": 77, "min_responses_required": 2}.items()
    assert "nvflare_lazy" not in json.dumps(export(recipe))
    with pytest.raises(ValueError, match="checkpoint and initial_ckpt cannot be combined"):
        SwarmLearningRecipe(**given | {"checkpoint": "/a", "initial_ckpt": "/b"})


def test_sites_that_are_configured_one_by_one(script, export):
    """Each has its own arguments, and each the component."""
    recipe = FedAvgRecipe(name="apart", model=Small(), min_clients=2, num_rounds=1, train_script=script)
    set_per_site_config(recipe, {f"site-{site}": {"train_args": f"--data {site}"} for site in (1, 2)})
    for site in (1, 2):
        config = export(recipe, "client", f"app_site-{site}")
        component(config, "TensorOffload")
        assert config["executors"][0]["executor"]["args"]["task_script_args"] == f"--data {site}"


def test_the_package_is_never_copied_into_a_job(script, export, tmp_path):
    """It is installed where the job runs; the model's file and the script travel."""
    export(FedAvgRecipe(name="lean", model=Small(), min_clients=2, num_rounds=1, train_script=script))
    travels = list((tmp_path / "jobs").rglob("*.py"))
    assert "train.py" in {path.name for path in travels}
    assert not any("nvflare_lazy" in path.parts for path in travels)


def test_fedprox_sends_its_coefficient(script, export):
    """The controller has it, and refuses one that is not positive before there is a job."""
    recipe = FedProxRecipe(model=Small(), fedprox_mu=0.25, min_clients=2, num_rounds=1, train_script=script)
    assert controller(export(recipe))["args"]["fedprox_mu"] == 0.25
    with pytest.raises(ValueError, match="mu"):
        FedProxRecipe(model=Small(), fedprox_mu=-1, min_clients=2, num_rounds=1, train_script=script)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {"name": "fedavgm", "lr": 1.0, "momentum": 0.0}),
        ({"path": "torch.optim.SGD", "args": {"lr": 0.5, "momentum": 0.9}}, {"name": "fedavgm", "lr": 0.5}),
        ({"path": "torch.optim.Adam", "args": {"lr": 0.1, "betas": (0.8, 0.9)}}, {"name": "fedadam", "beta1": 0.8}),
        ({"class_path": "torch.optim.Adagrad", "args": {}}, {"name": "fedadagrad", "lr": 0.01}),
        ({"name": "fedyogi", "lr": 0.02}, {"name": "fedyogi", "lr": 0.02}),
    ],
)
def test_server_optimizers_as_nvflare_names_them(script, export, given, expected):
    """A torch optimizer by its path is the paper's optimizer; the others have names."""
    recipe = FedOptRecipe(model=Small(), optimizer_args=given, min_clients=2, num_rounds=1, train_script=script)
    found = controller(export(recipe))["args"]["aggregator"]["args"]["server_optimizer"]
    assert found.items() >= expected.items()


@pytest.mark.parametrize(
    ("recipe", "given", "expected"),
    [
        # With FULL, a script may still send differences, as those with NVFlare's PTScaffoldHelper do.
        (FedAvgRecipe, {}, None),
        (FedAvgRecipe, {"params_transfer_type": TransferType.DIFF}, "DIFF"),
        (FedOptRecipe, {}, "DIFF"),
    ],
)
def test_kind_of_results(script, export, recipe, given, expected):
    """The server accepts only differences if NVFlare's client computes them, whatever a script returns."""
    arguments = {"model": Small(), "min_clients": 2, "num_rounds": 1, "train_script": script, **given}
    config = export(recipe(**arguments))
    assert controller(config)["args"]["aggregator"]["args"].get("params_type") == expected
    assert component(config, "TensorOffload").get("params_type") == expected
    some = recipe(**arguments)
    set_per_site_config(some, {"site-1": {}, "site-2": {"params_transfer_type": TransferType.FULL}})
    config = export(some, app="app_server")
    assert controller(config)["args"]["aggregator"]["args"].get("params_type") is None
    assert component(config, "TensorOffload").get("params_type") is None


WRONG = [
    (FedAvgRecipe, {"checkpoint": "/a", "initial_ckpt": "/b"}, "cannot be combined"),
    (FedAvgRecipe, {"model": "Small"}, "model"),
    (FedOptRecipe, {"model": Small(), "optimizer_args": {"path": "torch.optim.LBFGS"}}, "no server optimizer for"),
    (
        FedOptRecipe,
        {"model": Small(), "optimizer_args": {"path": "torch.optim.SGD", "args": {"x": 1}}},
        "not support x",
    ),
    (ScaffoldRecipe, {"model": Small(), "rule": "median"}, "its own rule"),
    (ScaffoldRecipe, {"model": Small(), "exclude_vars": "bn"}, "does not support exclude_vars"),
]


@pytest.mark.parametrize(("recipe", "given", "says"), WRONG)
def test_what_cannot_be_is_said_before_there_is_a_job(recipe, given, says, script):
    """With what to do instead."""
    with pytest.raises((ValueError, TypeError), match=says):
        recipe(min_clients=2, num_rounds=1, train_script=script, **given)


@pytest.mark.filterwarnings("ignore:save_filename is deprecated")
@pytest.mark.parametrize("argument", ["best_model_filename", "save_filename"])
def test_the_name_of_the_best_model(script, export, argument):
    """NVFlare's argument names a PyTorch file: then that file is also written, and our file has the same stem."""
    recipe = FedAvgRecipe(model=Small(), min_clients=2, num_rounds=1, train_script=script, **{argument: "winner.pt"})
    persistor = component(export(recipe), "LazyModelPersistor")
    assert persistor["best_global_model_file_name"] == "winner.safetensors"
    assert persistor["save_pytorch"] is True


def test_cross_site_evaluation_is_ours(script, export):
    """NVFlare's utility adds a locator that refuses our persistor, and a controller that holds models."""
    recipe = FedAvgRecipe(name="evaluated", model=Small(), min_clients=2, num_rounds=1, train_script=script)
    add_cross_site_evaluation(recipe, submit_model_timeout=7, participating_clients=["site-1"])
    config = export(recipe)
    evaluation = config["workflows"][1]
    assert evaluation["path"] == "nvflare_lazy.flare.LazyCrossSiteEval"
    assert evaluation["args"]["submit_model_timeout"] == 7
    assert evaluation["args"]["participating_clients"] == ["site-1"]
    named = {part["id"]: part["path"].rpartition(".")[2] for part in config["components"]}
    assert named[evaluation["args"]["model_locator_id"]] == "LazyModelLocator"
    assert "PTFileModelLocator" not in named.values()
