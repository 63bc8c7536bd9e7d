# SPDX-License-Identifier: Apache-2.0
"""The numbers of `nvflare-lazy plan` and the jobs that it plans."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.planned_jobs import JOBS, compare
from tests.test_job_plan import assert_within


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_five_jobs(tmp_path: Path):
    """Disk, memory of each process and traffic are within 15 % of the plan, for five different jobs."""
    out = tmp_path / "measured.json"
    command = [sys.executable, "-m", "benchmarks.planned_jobs", "--out", str(out)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])})
    found = json.loads(out.read_text())
    assert len(found["jobs"]) == len(JOBS)
    assert_within(compare(found))
