# SPDX-License-Identifier: Apache-2.0
"""ScatterAndGather, NVFlare's older controller, with our aggregator or its own: all results count but the bad ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nvflare_lazy
from benchmarks.fl_job import FLJob, RunResult
from integration_tests.conftest import JobRunner, left_in, records, server_app
from integration_tests.expected import next_global, start, ulps

FAULTY = Path(__file__).parent / "faulty_trainer.py"
STOCK_AGGREGATOR = {
    "path": "nvflare.app_common.aggregators.intime_accumulate_model_aggregator.InTimeAccumulateWeightedAggregator",
    "args": {"expected_data_kind": "WEIGHTS"},
}
GENERATOR = "nvflare.app_common.shareablegenerators.full_model_shareable_generator.FullModelShareableGenerator"


class ScatterAndGatherJob(FLJob):
    """The job with another controller, and the components that it requires."""

    def server(self) -> dict[str, Any]:
        config = super().server()
        args = config["workflows"][0]["args"]
        aggregator = args.get("aggregator", STOCK_AGGREGATOR)
        config["workflows"][0] = {
            "id": "controller",
            "path": "nvflare.app_common.workflows.scatter_and_gather.ScatterAndGather",
            "args": {"min_clients": self.clients, "num_rounds": self.rounds, "persistor_id": "persistor"},
        }
        config["components"] += [
            {"id": "aggregator", **aggregator},
            {"id": "shareable_generator", "path": GENERATOR, "args": {}},
        ]
        return config


def saved(result: RunResult) -> torch.Tensor:
    if result.job.mode == "component":
        return torch.load(server_app(result) / "FL_global_model.pt")["model"]["layer00002"]
    return nvflare_lazy.open(server_app(result) / "FL_global_model.safetensors")["layer00002"].materialize()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["level-2", "level-1"])
def test_all_results_count_but_the_bad_ones(run_job: JobRunner, mode: str):
    """Garbage and a wrong shape in the first round cost their clients' results only, and the log has the reason."""
    job = ScatterAndGatherJob(mode=mode, clients=4, model_mib=1, tensors=4, rounds=2, trainer=FAULTY)
    result = run_job(job, environment={"FAULTS": '{"2": "garbage", "3": "shape"}'})
    first, second = records(result, "round")
    assert first["aggregated"] == ["site-1", "site-4"]
    assert first["skipped"].keys() == {"site-2", "site-3"}
    assert "shape" in first["skipped"]["site-3"]
    assert second["aggregated"] == ["site-1", "site-2", "site-3", "site-4"]
    assert len(records(result, "contribution")) == 8
    value = next_global(start(2, job.elements), [1, 4]).astype("float32")
    # Stock aggregation works in float32.
    assert ulps(saved(result).numpy(), next_global(value, [1, 2, 3, 4])) <= (1 if mode == "level-2" else 8)
    assert not left_in(result.workspace.parent / "scratch")
