# SPDX-License-Identifier: Apache-2.0
"""NVFlare's own filters on the server's receiving path, with results that are lazy when the filter gets them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import nvflare_lazy
from benchmarks.fl_job import FLJob
from integration_tests.conftest import JobRunner, records, server_app
from integration_tests.expected import next_global, start, ulps

FILTERS = Path(__file__).parent / "filters"


@pytest.mark.parametrize("mode", ["level-2", pytest.param("level-1", marks=pytest.mark.slow)])
def test_exclude_vars_and_percentile_privacy(run_job: JobRunner, mode: str):
    """One takes tensors out unread, the other computes with all of them; any aggregator continues with the rest."""
    job = FLJob(
        mode=mode,
        exchange="numpy",
        difference=True,
        model_mib=1,
        tensors=4,
        rounds=1,
        filters=(
            {"path": "nvflare.app_common.filters.exclude_vars.ExcludeVars", "args": {"exclude_vars": ["layer00000"]}},
            {
                "path": "nvflare.app_common.filters.percentile_privacy.PercentilePrivacy",
                "args": {"percentile": 0, "gamma": 100.0},
            },
        ),
    )
    result = run_job(job)
    if mode == "level-2":
        saved = nvflare_lazy.open(server_app(result) / "FL_global_model.safetensors")
    else:
        saved = torch.load(server_app(result) / "FL_global_model.pt")["model"]
    assert np.array_equal(saved["layer00000"].numpy(), start(0, job.elements))
    # The filter divides by the number of steps and multiplies again.
    assert ulps(saved["layer00003"].numpy(), next_global(start(3, job.elements), [1, 2], difference=True)) < 8
    (record,) = records(result, "round")
    assert record["aggregated"] == ["site-1", "site-2"]


@pytest.mark.slow
def test_quantized_results(run_job: JobRunner):
    """Clients quantize to float16, the server dequantizes lazily received tensors, and the mean is right to float16."""
    job = FLJob(
        mode="level-2",
        model_mib=1,
        tensors=4,
        rounds=2,
        filters=({"path": "nvflare.app_opt.pt.quantization.dequantizer.ModelDequantizer"},),
        client_filters=(
            {
                "path": "nvflare.app_opt.pt.quantization.quantizer.ModelQuantizer",
                "args": {"quantization_type": "float16"},
            },
        ),
        files=(FILTERS / "bitsandbytes",),
    )
    result = run_job(job)
    assert "Dequantized" in result.server_log
    saved = nvflare_lazy.open(server_app(result) / "FL_global_model.safetensors")
    value = start(1, job.elements)
    for _ in range(job.rounds):
        value = next_global(value, [1, 2]).astype(np.float32)
    assert saved["layer00001"].dtype == torch.float32
    assert np.allclose(saved["layer00001"].numpy(), value, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["pytorch", "numpy"])
def test_client_filter_that_writes_to_the_values(run_job: JobRunner, exchange: str):
    """Results of external trainers reach a client's filter in memory, though everything else goes to disk."""
    job = FLJob(
        mode="level-3",
        exchange=exchange,
        model_mib=1,
        tensors=4,
        rounds=1,
        external=True,
        client_filters=({"path": "in_place.AddInPlace", "args": {"summand": 2.0}},),
        files=(FILTERS / "in_place.py",),
    )
    result = run_job(job)
    saved = nvflare_lazy.open(server_app(result) / "FL_global_model.safetensors")
    assert ulps(saved["layer00001"].numpy(), next_global(start(1, job.elements), [1, 2]) + 2.0) < 8
    (record,) = records(result, "round")
    assert record["aggregated"] == ["site-1", "site-2"]
