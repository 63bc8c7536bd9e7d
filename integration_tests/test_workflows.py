# SPDX-License-Identifier: Apache-2.0
"""NVFlare's workflows other than FedAvg: each gives with this package what it gives without, and its logs are right."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.app_common.aggregators import InTimeAccumulateWeightedAggregator
from nvflare.app_common.ccwf.ccwf_job import CCWFJob, CyclicClientConfig, CyclicServerConfig
from nvflare.app_common.np.np_model_persistor import NPModelPersistor
from nvflare.app_common.np.np_trainer import NPTrainer
from nvflare.app_common.shareablegenerators import FullModelShareableGenerator
from nvflare.app_common.widgets.validation_json_generator import ValidationJsonGenerator
from nvflare.app_common.workflows.cross_site_model_eval import CrossSiteModelEval
from nvflare.app_common.workflows.scatter_and_gather import ScatterAndGather
from nvflare.app_opt.pt.file_model_persistor import PTFileModelPersistor
from nvflare.app_opt.pt.job_config.model import PTModel
from nvflare.app_opt.pt.recipes.cyclic import CyclicRecipe
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.app_opt.pt.recipes.fedce import FedCERecipe
from nvflare.app_opt.pt.recipes.fedeval import FedEvalRecipe
from nvflare.collab import CollabRecipe
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner
from nvflare.recipe.spec import Recipe

import nvflare_lazy
from benchmarks.fl_job import RunResult
from integration_tests.conftest import JobRunner, records, server_app
from integration_tests.recipe_job import RecipeJob, RecipeOf, complaints
from nvflare_lazy.recipes import make_lazy
from tests.scratch.conftest import wait_until_empty

HELLO = Path(__file__).parent / "hello"
TRAIN = str(HELLO / "train.py")
WORKFLOWS = Path(__file__).parent / "workflows"


@pytest.fixture
def net(monkeypatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(HELLO))
    monkeypatch.syspath_prepend(str(WORKFLOWS))
    import net

    yield net
    for name in ("net", "collab_average", "adding_executor"):
        sys.modules.pop(name, None)


@pytest.fixture
def stock_and_lazy(run_job: JobRunner, tmp_path: Path, net: Any) -> Callable[..., tuple[RunResult, RunResult]]:
    """Runs the job of a recipe without this package and at one of its levels.

    With it, as many results must arrive on disk as the caller says, and the job must leave nothing behind.
    """

    def run(make: Callable[[], Recipe], level: int, *, on_disk: int, **options: Any) -> tuple[RunResult, RunResult]:
        stock, lazy = make(), make()
        make_lazy(lazy, level, **options)
        seen = [tmp_path / "stock.jsonl", tmp_path / "lazy.jsonl"]
        results = [
            run_job(RecipeJob(recipe=recipe), environment={"WITNESS": str(path)}, timeout=300)
            for recipe, path in zip((stock, lazy), seen, strict=True)
        ]
        types = [
            [json.loads(line)["types"] for line in path.read_text().splitlines()] if path.exists() else []
            for path in seen
        ]
        assert len(types[0]) == len(types[1]) == on_disk
        assert not any(name.startswith("Lazy") for names in types[0] for name in names)
        assert all(name.startswith("Lazy") for names in types[1] for name in names)
        assert complaints(results[1]) <= complaints(results[0])
        wait_until_empty(results[1].workspace.parent / "scratch")
        return results[0], results[1]

    return run


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """The global model that a job without or with this package has written."""
    path = folder / "FL_global_model.safetensors"
    return dict(nvflare_lazy.open(path) if path.exists() else torch.load(folder / "FL_global_model.pt")["model"])


def check_model(stock: RunResult, lazy: RunResult, *, exact: bool) -> None:
    """Compare the global models: at level 1, and where nothing is averaged, to the last bit."""
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    found = {name: value.clone() for name, value in saved(server_app(lazy)).items()}
    torch.testing.assert_close(found, saved(server_app(stock)), check_dtype=exact, **tolerance)


def accepted_on_disk(result: RunResult) -> list[tuple[int, str]]:
    """Round and client of each result that the job's records say was received on disk and accepted."""
    found = records(result, "contribution")
    return sorted((part["round"], part["client"]) for part in found if part["on_disk"] and part["accepted"])


BOTH_ROUNDS = [(0, "site-1"), (0, "site-2"), (1, "site-1"), (1, "site-2")]


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2, 3])
def test_cyclic_training_and_cross_site_evaluation(stock_and_lazy, net, level):
    """Each site trains the model of the one before; then every model is evaluated at every site."""

    def make() -> Recipe:
        recipe = CyclicRecipe(
            model=net.Net(16),
            train_script=TRAIN,
            server_expected_format="pytorch",
            # Otherwise a site of a busy machine is skipped.
            task_assignment_timeout=300,
            # Otherwise the site that registers first is the first one.
            server_config_overrides={"order": ["site-1", "site-2"]},
        )
        # NVFlare's function for this refuses the recipe, whose job has all that it needs.
        recipe._job.to_server(CrossSiteModelEval(model_locator_id="locator"))
        recipe._job.to_server(ValidationJsonGenerator())
        return recipe

    # Four of training and two submitted models.
    stock, lazy = stock_and_lazy(make, level, on_disk=6)
    check_model(stock, lazy, exact=True)
    expected, found = (
        json.loads((result.server_run_dir / "cross_site_val" / "cross_val_results.json").read_text())
        for result in (stock, lazy)
    )
    assert {site: sorted(evaluated.values(), key=str) for site, evaluated in found.items()} == {
        site: sorted(evaluated.values(), key=str) for site, evaluated in expected.items()
    }
    assert found["site-1"].keys() >= {"site-1", "site-2"}
    # The evaluation has no records.
    assert [(part["round"], part["client"]) for part in records(lazy, "contribution")] == BOTH_ROUNDS
    assert [(part["round"], part["aggregated"], part["skipped"]) for part in records(lazy, "round")] == [
        (number, [], {}) for number in range(2)
    ]
    assert "Round None" not in lazy.server_log


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 3])
def test_cyclic_training_that_the_clients_control(stock_and_lazy, net, level):
    """The clients pass the model on to each other without the server, and each one has the result."""

    def make() -> Recipe:
        job = CCWFJob(name="cyclic", min_clients=2)
        job.add_cyclic(
            CyclicServerConfig(num_rounds=2, starting_client="site-1"),
            CyclicClientConfig(
                executor=ScriptRunner(script=TRAIN, server_expected_format="pytorch"),
                persistor=PTFileModelPersistor(model=net.Net(16), allow_numpy_conversion=False),
                shareable_generator=FullModelShareableGenerator(),
            ),
        )
        return RecipeOf(job)

    stock, lazy = stock_and_lazy(make, level, on_disk=0)
    for site in ("site-1", "site-2"):
        expected, found = (saved(result.workspace / site / "simulate_job" / f"app_{site}") for result in (stock, lazy))
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 3])
def test_fedce(stock_and_lazy, net, level):
    """Contribution weights computed from all tensors of all clients, and sent back with the next model."""
    arguments = {"num_rounds": 2, "train_script": TRAIN, "train_args": "--fedce"}
    stock, lazy = stock_and_lazy(lambda: FedCERecipe(model=net.Net(16), min_clients=2, **arguments), level, on_disk=4)
    # The aggregator of the recipe stays at all levels.
    check_model(stock, lazy, exact=True)
    assert accepted_on_disk(lazy) == BOTH_ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 3])
def test_fedeval(stock_and_lazy, net, tmp_path, level):
    """A checkpoint goes to the clients, and metrics come back."""
    checkpoint = tmp_path / "model.pt"
    torch.save(net.Net(16).state_dict(), checkpoint)
    arguments = {"eval_ckpt": str(checkpoint), "eval_script": TRAIN}
    stock, lazy = stock_and_lazy(lambda: FedEvalRecipe(model=net.Net(16), min_clients=2, **arguments), level, on_disk=0)
    expected, found = (
        sorted(line.partition("Metrics: ")[2] for line in result.server_log.splitlines() if "Metrics: " in line)
        for result in (stock, lazy)
    )
    assert found == expected
    assert len(found) == 2


@pytest.mark.slow
def test_collab_functions_that_aggregate_on_disk(run_job, net, tmp_path):
    """`nvflare_lazy.aggregate` in a server's function: what it returns is sent to the clients as it is."""
    import collab_average

    recipe = CollabRecipe(job_name="collab", server=collab_average, client=collab_average, min_clients=2)
    recipe.set_server_prop("path", str(tmp_path))
    make_lazy(recipe, level=1)
    result = run_job(RecipeJob(recipe=recipe, watched=False))
    assert result.output.count("server received LazyTensor") == 2
    assert not complaints(result)
    wait_until_empty(result.workspace.parent / "scratch")
    expected = collab_average.initial_model()
    for _ in range(2):
        expected = {name: ((value * 0.5 + 1) + (value * 0.5 + 2)) / 2 for name, value in expected.items()}
    found = nvflare_lazy.open(tmp_path / "model-1.safetensors")
    assert expected.keys() == {*found}
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("default:NPTrainer is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("exchange", "level"), [("pytorch", 1), ("pytorch", 3), ("numpy", 1)])
def test_executors_from_before_the_client_api(stock_and_lazy, net, exchange, level):
    """An executor with a Shareable in and out; NVFlare's own writes to what it gets, so the component is elsewhere."""
    from adding_executor import AddingExecutor

    def make() -> Recipe:
        job = FedJob(name="executor", min_clients=2)
        if exchange == "pytorch":
            persistor_id = job.to_server(PTModel(net.Net(16), allow_numpy_conversion=False))["persistor_id"]
            executor, kind = AddingExecutor(), "WEIGHT_DIFF"
        else:
            persistor_id = job.to_server(NPModelPersistor(), id="persistor")
            executor, kind = NPTrainer(), "WEIGHTS"
        job.to_server(InTimeAccumulateWeightedAggregator(expected_data_kind=kind), id="aggregator")
        job.to_server(FullModelShareableGenerator(), id="shareable_generator")
        job.to_server(ScatterAndGather(min_clients=2, num_rounds=2, persistor_id=persistor_id))
        job.to_clients(executor, tasks=["train"])
        return RecipeOf(job)

    stock, lazy = stock_and_lazy(make, level, on_disk=4)
    if exchange == "pytorch":
        check_model(stock, lazy, exact=level == 1)
    else:
        expected, found = (np.load(next(result.workspace.glob("server/**/server.npy"))) for result in (stock, lazy))
        assert np.array_equal(expected, found)
    assert accepted_on_disk(lazy) == BOTH_ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 3])
def test_a_trainer_of_two_ranks(stock_and_lazy, net, monkeypatch, level):
    """`torchrun` starts two processes; the first one receives, sends, and broadcasts to the other.

    At level 3 the job says that they use this package.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def make() -> Recipe:
        return FedAvgRecipe(
            model=net.Net(16),
            min_clients=2,
            num_rounds=2,
            train_script=str(WORKFLOWS / "distributed_train.py"),
            launch_external_process=True,
            command=f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node=2",
            server_expected_format="pytorch",
        )

    stock, lazy = stock_and_lazy(make, level, on_disk=4, install_in_trainers=level == 3)
    check_model(stock, lazy, exact=level == 1)
    assert accepted_on_disk(lazy) == BOTH_ROUNDS
    assert ("rank 0 received LazyTensor" in lazy.output) == (level == 3)


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [True, False], ids=["tensor streaming", "in messages"])
def test_results_in_memory_are_reported_once(run_job, net, streaming):
    """NVFlare's ways around this package work as without it; one warning names the way and what to do."""
    recipe = FedAvgRecipe(
        model=net.Net(16), min_clients=2, num_rounds=2, train_script=TRAIN, server_expected_format="pytorch"
    )
    if streaming:
        recipe.enable_tensor_streaming()
    make_lazy(recipe)
    environment = {} if streaming else {"NVFLARE_TENSOR_DOWNLOAD_CHUNK_SIZE": "0"}
    result = run_job(RecipeJob(recipe=recipe, watched=False), environment=environment)
    [warning] = [line for line in result.server_log.splitlines() if "Results are in memory, not on disk" in line]
    assert "WARNING" in warning
    assert ("enable_tensor_streaming()" if streaming else "tensor_download_chunk_size") in warning
    tensors = len(net.Net(16).state_dict())
    assert [(part["tensors"], part["on_disk"]) for part in records(result, "contribution")] == [(tensors, False)] * 4
    assert [part["aggregated"] for part in records(result, "round")] == [["site-1", "site-2"]] * 2
