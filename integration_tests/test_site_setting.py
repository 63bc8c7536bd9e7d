# SPDX-License-Identifier: Apache-2.0
"""NVFlare's setting of a package to import, on sites where this one is installed: no job and no script names it.

With `nvflare_lazy.flare.decomposers` NVFlare's own switch `enable_tensor_disk_offload` decides for each job, with
`nvflare_lazy.flare.install` all jobs receive on disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper

from benchmarks.fl_job import MIB, FLJob, RunResult, run_in_simulator
from benchmarks.fl_job.poc import run_in_poc
from benchmarks.fl_job.swarm_job import SwarmJob
from benchmarks.fl_job.synthetic_model import initial_values, step
from integration_tests.conftest import JobRunner, in_deployment, server_app
from tests.scratch.conftest import wait_until_empty

DECOMPOSERS, INSTALL = "nvflare_lazy.flare.decomposers", "nvflare_lazy.flare.install"


def setting(package: str) -> dict[str, str]:
    return {"NVFLARE_NVFLARE_DECOMPOSERS": package}


def places(log: str) -> set[str]:
    """Return where a process received tensors, from its log."""
    return set(re.findall(r"Received .* from .* s, .*, (on disk|in memory)", log))


def client_logs(result: RunResult) -> str:
    return "".join(log.read_text() for log in result.workspace.glob("site-*/**/log.txt"))


def global_model(result: RunResult) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = torch.load(server_app(result) / "FL_global_model.pt")["model"]
    return model


def check_model(saved: dict[str, torch.Tensor], job: FLJob) -> None:
    """Check that a model has the bits that NVFlare's aggregation gives with ordinary tensors."""
    assert len(saved) == job.tensors
    for index, name in enumerate(saved):
        value = initial_values(index, job.elements)
        for number in range(job.rounds):
            helper = WeightedAggregationHelper()
            for site in (1, 2):
                sent = step(value, site)
                helper.add({name: sent.numpy() if job.exchange == "numpy" else sent}, site, f"site-{site}", number)
            value = torch.as_tensor(helper.get_result()[name])
        assert torch.equal(saved[name], value)


@pytest.mark.parametrize(
    ("package", "switch", "exchange", "external", "server", "clients"),
    [
        pytest.param(
            *(DECOMPOSERS, True, "pytorch", False, {"on disk"}, {"in memory"}), id="switch", marks=pytest.mark.slow
        ),
        pytest.param(
            *(DECOMPOSERS, True, "numpy", True, {"on disk"}, set()), id="switch-numpy-external", marks=pytest.mark.slow
        ),
        pytest.param(
            *(DECOMPOSERS, False, "pytorch", False, {"in memory"}, {"in memory"}),
            id="no switch",
            marks=pytest.mark.slow,
        ),
        pytest.param(INSTALL, False, "pytorch", False, {"on disk"}, {"on disk"}, id="install", marks=pytest.mark.slow),
    ],
)
def test_in_the_simulator(
    run_job: JobRunner,
    package: str,
    switch: bool,
    exchange: str,
    external: bool,
    server: set[str],
    clients: set[str],
):
    """A stock job, with or without the switch, whose external trainers do not use the package either."""
    job = FLJob(
        mode="offload" if switch else "stock", exchange=exchange, external=external, model_mib=1, tensors=4, rounds=2
    )
    result = run_job(job, environment=setting(package))
    assert places(result.server_log) == server
    assert places(client_logs(result)) == clients
    # Once, with the first result.
    scratch = result.workspace.parent / "scratch"
    assert result.server_log.count(f"Receiving tensors to {scratch}") == ("on disk" in server)
    check_model(global_model(result), job)
    wait_until_empty(scratch)


@pytest.mark.slow
@in_deployment
@pytest.mark.parametrize("external", [False, True])
def test_in_a_deployment(tmp_path: Path, external: bool):
    """The setting is in the sites' `resources.json`."""
    job = FLJob(mode="offload", model_mib=1, tensors=4, rounds=2, external=external)
    result = run_in_poc(job, tmp_path, resources={"nvflare_decomposers": DECOMPOSERS})
    assert result.ok, result.output[-3000:]
    assert places(result.server_log) == {"on disk"}
    check_model(global_model(result), job)
    wait_until_empty(tmp_path / "scratch")


@pytest.mark.slow
def test_memory(run_job: JobRunner):
    """The server holds no results, and the model has the bits of the job without the package."""
    model_mib = 128
    lazy = run_job(FLJob(mode="offload", model_mib=model_mib, tensors=16, rounds=2), environment=setting(DECOMPOSERS))
    check_model(global_model(lazy), lazy.job)
    stock = run_job(FLJob(mode="offload", model_mib=model_mib, tensors=16, rounds=2))
    assert not places(stock.server_log)
    found, expected = global_model(lazy), global_model(stock)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    peaks = lazy.server_peak / MIB, stock.server_peak / MIB
    print(f"the server takes {peaks[0]:.0f} MiB, and {peaks[1]:.0f} MiB without the package")
    assert lazy.server_peak < stock.server_peak - 2 * model_mib * MIB


@pytest.mark.slow
@in_deployment
# NVFlare's recipe requests this for arrays; with this package they are also on disk.
@pytest.mark.filterwarnings("ignore:enable_tensor_disk_offload=True only applies")
@pytest.mark.parametrize(("exchange", "external"), [("pytorch", False), ("pytorch", True), ("numpy", True)])
@pytest.mark.parametrize("run", [run_in_simulator, run_in_poc])
def test_swarm(tmp_path: Path, run: Callable[..., RunResult], exchange: str, external: bool):
    """The sites that aggregate receive on disk, and their model equals NVFlare's aggregation to the bit."""
    job = SwarmJob(mode="offload", exchange=exchange, model_mib=1, tensors=4, rounds=2, external=external)
    result = run(job, tmp_path, environment=setting(DECOMPOSERS))
    assert result.ok, result.output[-3000:]
    assert "on disk" in places(client_logs(result))
    models = [torch.load(file)["model"] for file in result.workspace.rglob("FL_global_model.pt")]
    assert models
    for model in models:
        check_model(model, job)
    wait_until_empty(tmp_path / "scratch")
