# SPDX-License-Identifier: Apache-2.0
"""Warnings about a job that runs, and does not run as its author intends."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.fl_job import FLJob
from integration_tests.conftest import JobRunner


class WithoutInstall(FLJob):
    """The clients have the component, and their training scripts do not use the package."""

    def client(self) -> dict[str, Any]:
        config = super().client()
        executor = config["executors"][0]["executor"]["args"]
        executor["command"].remove("--install")
        return config


@pytest.mark.slow
def test_each_warning_is_logged_once(run_job: JobRunner):
    """A training script without the package, and settings without effect, in a job of two rounds."""
    aggregator = {"rule": "median", "aggregation_weights": {"site-1": 2.0, "site-7": 1.0}, "exclude_vars": "nothing"}
    offload = {"handoff": False, "params_type": "FULL"}
    job = WithoutInstall(mode="level-3", external=True, model_mib=8, aggregator=aggregator, offload=offload)
    result = run_job(job)
    for warning in (
        "Setting without effect: aggregation_weights, because the rule median ignores weights",
        "Setting without effect: aggregation_weights of 'site-7', because the job has no such client",
        "Setting without effect: exclude_vars='nothing', because no tensor has a matching name",
        "Setting without effect: handoff, because no process that sent tensors in this round uses nvflare-lazy",
    ):
        assert result.server_log.count(warning) == 1
    for site in ("site-1", "site-2"):
        log = (result.workspace / site / "log.txt").read_text()
        assert log.count("Setting without effect: params_type, because this client does not aggregate") == 1
        assert log.count("The training script of this site does not use nvflare-lazy") == 1
