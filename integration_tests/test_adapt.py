# SPDX-License-Identifier: Apache-2.0
"""Jobs from NVFlare's recipes, adapted by the command: level 1 gives the same bits, level 2 the same numbers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.app_opt.pt.recipes import FedAvgRecipe
from nvflare.app_opt.pt.recipes.fedopt import FedOptRecipe
from nvflare.app_opt.pt.recipes.fedprox import FedProxRecipe
from nvflare.app_opt.pt.recipes.scaffold import ScaffoldRecipe
from nvflare.app_opt.pt.recipes.swarm import SwarmLearningRecipe
from nvflare.client.config import ExchangeFormat, TransferType
from nvflare.recipe.utils import add_cross_site_evaluation

import nvflare_lazy
from integration_tests.conftest import left_in

HELLO = Path(__file__).parent / "hello"
# A round of the job trains for 8 steps, which amplify the differences in the last bits of the round before.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-7}


@pytest.fixture
def net(monkeypatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(HELLO))
    import net

    yield net
    sys.modules.pop("net", None)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, torch.Tensor]]:
    """Run a job folder, adapted by the command, and return its global model."""

    def run(job: Path, level: int | None, model: str = "server/simulate_job/app_server") -> dict[str, torch.Tensor]:
        scratch = tmp_path / "scratch"
        scratch.mkdir(mode=0o700, exist_ok=True)
        workspace = tmp_path / f"workspace-{level}"
        environment = {**os.environ, "NVFLARE_LAZY_SCRATCH": str(scratch)}

        def call(*arguments: object) -> None:
            command = [sys.executable, "-m", *map(str, arguments)]
            done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

        if level is not None:
            adapted = tmp_path / f"level-{level}"
            call("nvflare_lazy.cli", "adapt", job, "--level", level, "--out", adapted)
            job = adapted
        # With two clients whose weights are powers of two, NVFlare's sums do not depend on the order of arrival.
        call("nvflare.private.fed.app.simulator.simulator", job, "-w", workspace, "-n", 2, "-t", 2)
        assert not left_in(scratch)
        path = workspace / model / f"FL_global_model.{'safetensors' if level in (2, 3) else 'pt'}"
        opened = nvflare_lazy.open(path, section="model" if path.suffix == ".pt" else None)
        tensors = {name: tensor.materialize() for name, tensor in opened.items()}
        shutil.rmtree(workspace)
        return tensors

    return run


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # The counters of normalization layers become floats in NVFlare's aggregation.
        torch.testing.assert_close(
            found[name].to(tensor.dtype), tensor, **TOLERANCE, msg=lambda text, n=name: f"{n}: {text}"
        )


def fedavg(**arguments: Any) -> Any:
    recipe = FedAvgRecipe(name="adapted", **arguments)
    add_cross_site_evaluation(recipe)
    return recipe


def fedopt(**arguments: Any) -> Any:
    optimizer = {"path": "torch.optim.SGD", "args": {"lr": 0.5, "momentum": 0.6}}
    schedule = {"path": "torch.optim.lr_scheduler.CosineAnnealingLR", "args": {"T_max": "{num_rounds}", "eta_min": 0.9}}
    return FedOptRecipe(name="adapted", optimizer_args=optimizer, lr_scheduler_args=schedule, **arguments)


def tensors_and_differences(**arguments: Any) -> Any:
    return FedAvgRecipe(
        name="adapted",
        server_expected_format=ExchangeFormat.PYTORCH,
        params_transfer_type=TransferType.DIFF,
        aggregation_weights={"site-1": 4.0},
        exclude_vars="last",
        **arguments,
    )


def scaffold(**arguments: Any) -> Any:
    return ScaffoldRecipe(name="adapted", train_args="--scaffold", **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        fedavg,
        tensors_and_differences,
        fedopt,
        scaffold,
        lambda **rest: FedProxRecipe(name="adapted", **rest),
    ],
    ids=["fedavg", "tensors_and_differences", "fedopt", "scaffold", "fedprox"],
)
def test_levels_of_nvflares_recipes(run, net, tmp_path, recipe):
    """Level 1 is bit-identical to NVFlare; levels 2 and 3 are equal to it up to the last bits, and to each other."""
    made = recipe(model=net.Net(16), min_clients=2, num_rounds=2, train_script=str(HELLO / "train.py"))
    made.export(str(tmp_path / "jobs"))
    job = tmp_path / "jobs" / "adapted"
    stock = run(job, None)
    assert_equal(run(job, 1), stock)
    second = run(job, 2)
    assert_close(second, stock)
    assert_equal(run(job, 3), second)


@pytest.mark.slow
def test_levels_of_swarm_learning(run, net, tmp_path):
    """The model is at the client that aggregated last."""
    made = SwarmLearningRecipe(
        name="adapted", model=net.Net(16), min_clients=2, num_rounds=2, train_script=str(HELLO / "train.py")
    )
    made.export(str(tmp_path / "jobs"))
    job = tmp_path / "jobs" / "adapted"
    where = "site-1/simulate_job/app_site-1"
    stock = run(job, None, where)
    assert_equal(run(job, 1, where), stock)
    assert_close(run(job, 2, where), stock)


SCATTER_AND_GATHER = """\
format_version = 2
net = "net.Net"
workflows = [
  {
    id = "scatter_and_gather"
    path = "nvflare.app_common.workflows.scatter_and_gather.ScatterAndGather"
    args {
      min_clients = 2, num_rounds = 2, wait_time_after_min_received = 0
      aggregator_id = "sum", persistor_id = "store", shareable_generator_id = "generator"
    }
  }
]
components = [
  { id = "net", path = "{net}", args.hidden = 24 }
  # saves the model
  { id = "store", path = "nvflare.app_opt.pt.file_model_persistor.PTFileModelPersistor", args.model = "net" }
  {
    id = "generator"
    path = "nvflare.app_common.shareablegenerators.full_model_shareable_generator.FullModelShareableGenerator"
    args {}
  }
  {
    id = "sum"
    path = "nvflare.app_common.aggregators.intime_accumulate_model_aggregator.InTimeAccumulateWeightedAggregator"
    args.expected_data_kind = "WEIGHT_DIFF"
  }
]
"""
CLIENT = """\
{
  format_version = 2
  executors = [
    {
      tasks = ["train"]
      executor {
        path = "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor"
        args {
          execution_mode = "in_process"
          task_script_path = "train.py", task_script_args = "--hidden 24"
          params_exchange_format = "pytorch", params_transfer_type = "DIFF"
        }
      }
    }
  ]
  components = []
}
"""


@pytest.mark.slow
def test_levels_of_a_job_in_hocon(run, tmp_path):
    """As NVFlare's templates are written: variables, dotted keys, the model as a component, differences."""
    app = tmp_path / "job" / "app"
    shutil.copytree(HELLO, app / "custom")
    (app / "config").mkdir()
    (app / "config" / "config_fed_server.conf").write_text(SCATTER_AND_GATHER)
    (app / "config" / "config_fed_client.conf").write_text(CLIENT)
    (tmp_path / "job" / "meta.json").write_text('{"name": "job", "min_clients": 2, "deploy_map": {"app": ["@ALL"]}}')
    stock = run(tmp_path / "job", None)
    assert stock["first.weight"].shape == (24, 8)
    assert_equal(run(tmp_path / "job", 1), stock)
    assert_close(run(tmp_path / "job", 3), stock)
