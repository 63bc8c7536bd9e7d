# SPDX-License-Identifier: Apache-2.0
"""Recipes with one import changed, jobs that really learn: FedAvg, a robust rule, FedOpt, SCAFFOLD; and evaluation."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from nvflare.app_opt.pt.recipes.fedopt import FedOptRecipe as StockFedOpt
from nvflare.app_opt.pt.recipes.scaffold import ScaffoldRecipe as StockScaffold
from nvflare.recipe import SimEnv
from nvflare.recipe.utils import add_cross_site_evaluation

import nvflare_lazy
from nvflare_lazy.flare.result_models import MANIFEST_NAME
from nvflare_lazy.recipes import FedAvgRecipe, FedOptRecipe, ScaffoldRecipe, make_lazy
from nvflare_lazy.records import FILE_NAME

HELLO = Path(__file__).parent / "hello"


@pytest.fixture
def net(monkeypatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(HELLO))
    import net

    yield net
    sys.modules.pop("net", None)


@pytest.fixture
def run(tmp_path, monkeypatch, net):
    """Runs a recipe in the simulator and returns the server's folder."""
    monkeypatch.setenv("NVFLARE_LAZY_SCRATCH", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir(mode=0o700)

    def run(recipe: Any, clients: int = 2) -> Path:
        env = SimEnv(num_clients=clients, workspace_root=str(tmp_path / "workspace"))
        recipe.execute(env)
        return tmp_path / "workspace" / recipe.name / "server" / "simulate_job" / "app_server"

    return run


def accuracy(net: Any, path: Path) -> float:
    model = net.Net()
    # NVFlare's own persistor puts the weights into a section.
    model.load_state_dict(nvflare_lazy.open(path, section="model" if path.suffix == ".pt" else None))
    model.eval()
    x, y = net.data(999)
    return float((model(x).argmax(1) == y).float().mean())


ARGUMENTS = {"train_script": str(HELLO / "train.py"), "num_rounds": 3}


@pytest.mark.slow
def test_fedavg_learns_and_selects_the_best_model(run, net):
    """The drop-in learns; the best model is the best there was, and the PyTorch file fits the plain class."""
    recipe = FedAvgRecipe(name="avg", model=net.Net(16), min_clients=2, save_pytorch=True, keep_rounds=3, **ARGUMENTS)
    app = run(recipe)
    models = json.loads((app.parent / MANIFEST_NAME).read_text())["artifacts"]
    last, best, *rounds = (
        app.parent / models[name] for name in ("global_model", "best_global_model", "round_0", "round_1")
    )
    assert (last.name, best.name) == ("FL_global_model.pt", "best_FL_global_model.pt")
    assert accuracy(net, last) > 0.9
    # The clients evaluate what they receive: all but the last model.
    assert best == max(rounds, key=lambda path: accuracy(net, path))
    assert torch.load(last, weights_only=True)["model"].keys() == net.Net(16).state_dict().keys()


@pytest.mark.slow
def test_a_robust_rule_stands_a_client_that_the_mean_does_not(run, net):
    """With one client of four that sends nonsense, the mean is ruined and the trimmed mean learns."""
    arguments = {**ARGUMENTS, "model": net.Net(16), "min_clients": 4, "train_args": "--poison site-4"}
    mean = run(FedAvgRecipe(name="mean", **arguments), clients=4)
    trimmed = run(FedAvgRecipe(name="trimmed", rule="trimmed_mean", **arguments), clients=4)
    assert accuracy(net, mean / "FL_global_model.safetensors") < 0.75
    assert accuracy(net, trimmed / "FL_global_model.safetensors") > 0.9


@pytest.mark.slow
def test_fedopt_learns_and_keeps_its_state_on_disk(run, net, tmp_path):
    """SGD with momentum and a schedule on the server; statistics of the normalization are averaged."""
    recipe = FedOptRecipe(
        name="opt",
        checkpoint_dir=str(tmp_path / "checkpoints"),
        model=net.Net(16),
        min_clients=2,
        optimizer_args={"path": "torch.optim.SGD", "args": {"lr": 1.0, "momentum": 0.3}},
        lr_scheduler_args={
            "path": "torch.optim.lr_scheduler.CosineAnnealingLR",
            "args": {"T_max": "{num_rounds}", "eta_min": 0.5},
        },
        **ARGUMENTS,
    )
    run(recipe)
    assert accuracy(net, tmp_path / "checkpoints" / "FL_global_model.safetensors") > 0.9
    assert list((tmp_path / "checkpoints" / "optimizer").iterdir())


@pytest.mark.slow
def test_scaffold_learns(run, net):
    """Control variates go out and come back through NVFlare's own helper on the client."""
    recipe = ScaffoldRecipe(
        name="scaffold", model=net.Net(16), min_clients=2, **{**ARGUMENTS, "train_args": "--scaffold"}
    )
    assert accuracy(net, run(recipe) / "FL_global_model.safetensors") > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stock", "arguments"),
    [
        (StockFedOpt, {"optimizer_args": {"path": "torch.optim.SGD", "args": {"lr": 1.0, "momentum": 0.3}}}),
        (StockScaffold, {"train_args": "--scaffold"}),
    ],
)
def test_nvflares_recipes_with_the_component(run, net, stock, arguments):
    """Controllers that are not FedAvg, with one component on the server: they learn, and every round is told."""
    recipe = stock(name="stock", model=net.Net(16), min_clients=2, **{**ARGUMENTS, **arguments})
    make_lazy(recipe, level=1)
    app = run(recipe)
    assert accuracy(net, app / "FL_global_model.pt") > 0.9
    records = [json.loads(line) for line in (app.parent / FILE_NAME).read_text().splitlines()]
    assert [(part["round"], part["aggregated"]) for part in records if part["kind"] == "round"] == [
        (number, ["site-1", "site-2"]) for number in range(3)
    ]
    assert all(part["on_disk"] and part["accepted"] for part in records if part["kind"] == "contribution")


@pytest.mark.slow
def test_cross_site_evaluation_with_nvflares_utility(run, net):
    """NVFlare's own way to add cross-site evaluation gets our parts of it; every model is evaluated at every site."""
    recipe = FedAvgRecipe(name="cse", model=net.Net(16), min_clients=2, **ARGUMENTS)
    add_cross_site_evaluation(recipe)
    app = run(recipe)
    job = app.parent
    results = json.loads((job / "cross_site_val" / "cross_val_results.json").read_text())
    models = {"SRV_FL_global_model.safetensors", "SRV_best_FL_global_model.safetensors", "site-1", "site-2"}
    assert results.keys() == {"site-1", "site-2"}
    for evaluations in results.values():
        assert evaluations.keys() >= models
        # The sites' test set is the one here.
        found = evaluations["SRV_FL_global_model.safetensors"]["accuracy"]
        assert found == pytest.approx(accuracy(net, app / "FL_global_model.safetensors"))
    # Passed on from disk; the server's models are not copied.
    passed_on = job / "cross_site_val" / "model_shareables"
    assert {*nvflare_lazy.open(passed_on / "site-1.safetensors")} == {*net.Net(16).state_dict()}
    assert sorted(path.name for path in passed_on.iterdir()) == ["site-1.safetensors", "site-2.safetensors"]
    assert "must be PTFileModelPersistor" not in (job.parent / "log.txt").read_text()


@pytest.mark.slow
def test_worker_processes(run, net, tmp_path):
    """Worker processes aggregate all rounds: the job learns, and they end with it."""
    executor = {"name": "processes", "max_workers": 2}
    app = run(FedAvgRecipe(name="workers", min_clients=2, model=net.Net(16), executor=executor, **ARGUMENTS))
    assert accuracy(net, app / "FL_global_model.safetensors") > 0.9
    log = (tmp_path / "workspace" / "workers" / "server" / "log.txt").read_text()
    assert log.count("Started the executor 'processes'") == 1
    assert not [*tmp_path.rglob("*.parts")]
    assert not [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in _described(process)]


def _described(process: psutil.Process) -> str:
    try:
        return " ".join([*process.cmdline(), *process.environ().values()])
    except psutil.Error:
        return ""
