# SPDX-License-Identifier: Apache-2.0
"""Runs jobs for the tests and tells what they wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fl_job import FLJob, RunResult, run_in_simulator
from nvflare_lazy.records import FILE_NAME

JobRunner = Callable[..., RunResult]

#: For tests that connect to a deployment: what NVFlare uses of aiohttp is deprecated there.
in_deployment = pytest.mark.filterwarnings("default:ssl_context is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _temporary_files(disposable_temporary_directory: None) -> None:
    """Every test here runs NVFlare."""


@pytest.fixture
def run_job(tmp_path: Path) -> JobRunner:
    """Runs a job in the simulator and fails with the end of its output if the job did."""
    count = 0

    def run(job: FLJob, *, may_fail: bool = False, **arguments: Any) -> RunResult:
        nonlocal count
        count += 1
        directory = tmp_path / f"job{count}"
        directory.mkdir()
        result = run_in_simulator(job, directory, timeout=arguments.pop("timeout", 600), **arguments)
        assert result.ok or may_fail, result.output[-5000:]
        return result

    return run


def records(result: RunResult, kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind that the job wrote."""
    path = result.server_run_dir / FILE_NAME
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in found if record["kind"] == kind]


def server_app(result: RunResult) -> Path:
    """Return the folder NVFlare keeps a server's models in."""
    return result.server_run_dir / "app_server"


def left_in(scratch: Path) -> list[str]:
    """Return the files left below a scratch root."""
    return [str(path.relative_to(scratch)) for path in scratch.rglob("*") if path.is_file()]
