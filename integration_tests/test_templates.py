# SPDX-License-Identifier: Apache-2.0
"""The job templates, made into jobs by NVFlare's own command, and run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nvflare_lazy

HELLO = Path(__file__).parent / "hello"
TEMPLATES = Path(__file__).parents[1] / "job_templates"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "clients"),
    [("lazy_fedavg_pt", 2), ("lazy_fedopt_pt", 2), ("lazy_robust_pt", 4)],
)
def test_a_template_makes_a_job_that_runs(tmp_path: Path, template: str, clients: int):
    """`nvflare job create` takes the template, and the simulator runs the resulting job."""
    nvflare = shutil.which("nvflare", path=str(Path(sys.executable).parent))
    environment = {**os.environ, "HOME": str(tmp_path), "NVFLARE_LAZY_SCRATCH": str(tmp_path)}
    job, workspace = tmp_path / "job", tmp_path / "workspace"
    code = tmp_path / "code"
    shutil.copytree(HELLO, code)

    def call(*arguments: object) -> None:
        done = subprocess.run(
            [nvflare, *map(str, arguments)], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    call("job", "create", "-force", "-w", TEMPLATES / template, "-j", job, "-sd", code)
    call("simulator", job, "-w", workspace, "-n", clients, "-t", clients)
    app = workspace / "server" / "simulate_job" / "app_server"
    assert "first.weight" in nvflare_lazy.open(app / "FL_global_model.safetensors")
