# SPDX-License-Identifier: Apache-2.0
"""`nvflare job download --format json` after jobs on a deployment: the global model is named, and is there once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import nvflare_lazy
from benchmarks.fl_job import FLJob
from benchmarks.fl_job.poc import Deployment, wait_for_clients
from integration_tests.conftest import in_deployment
from integration_tests.expected import next_global, start, ulps

MODEL_BYTES = 4 << 20
OPTIMIZER = {"server_optimizer": {"name": "fedavgm", "momentum": 1e-12}}


@in_deployment
@pytest.mark.slow
def test_the_download_of_a_job(tmp_path: Path):
    """Stock NVFlare's PyTorch file, and our checkpoints, also if they are elsewhere or in another format."""
    jobs = {
        "stock": (FLJob(mode="stock", model_mib=4), "FL_global_model.pt"),
        "level-2": (FLJob(mode="level-2", model_mib=4, aggregator=OPTIMIZER), "FL_global_model.safetensors"),
        "pytorch": (FLJob(mode="level-2", model_mib=4, persistor={"save_pytorch": True}), "FL_global_model.pt"),
        "elsewhere": (
            FLJob(mode="level-2", model_mib=4, persistor={"checkpoint_dir": str(tmp_path / "checkpoints")}),
            "FL_global_model.safetensors",
        ),
    }
    scratch = tmp_path / "scratch"
    scratch.mkdir(mode=0o700)
    with ExitStack() as stack:
        deployment = stack.enter_context(Deployment(tmp_path, 2, {"NVFLARE_LAZY_SCRATCH": str(scratch)}))
        session = stack.enter_context(closing(deployment.session()))
        wait_for_clients(session, 2)
        for name, (job, model) in jobs.items():
            job_id = session.submit_job(str(job.write(tmp_path / name)))
            session.monitor_job(job_id, timeout=300)
            environment = {**deployment.env, "NVFLARE_STARTUP_KIT_DIR": str(deployment.kits / "admin@example.com")}
            command = [Path(sys.executable).with_name("nvflare"), "job", "download", job_id, "--format", "json"]
            done = subprocess.run(
                [*command, "-o", tmp_path / "downloads"], env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stdout + done.stderr
            data = json.loads(done.stdout[done.stdout.index("{") :])["data"]
            path = Path(data["artifacts"]["global_model"])
            assert "global_model" not in data["missing_artifacts"]
            assert path.name == model, name
            found = nvflare_lazy.open(path, section="model" if path.suffix == ".pt" else None)
            value = next_global(start(1, job.elements), [1, 2]).astype("float32")
            assert ulps(found["layer00001"].numpy(), next_global(value, [1, 2])) <= 4, name
            large = [each for each in Path(data["path"]).rglob("*") if each.is_file() and each.stat().st_size > 1 << 20]
            assert [each.name for each in large] == [model]
            assert large[0].stat().st_size < MODEL_BYTES * 1.1
            print(f"{name}: {path.relative_to(data['path'])}, {sum(os.path.getsize(each) for each in large)} bytes")
    assert (tmp_path / "checkpoints" / "rounds" / "round-00000" / "model.safetensors").exists()
