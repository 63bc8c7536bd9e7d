# SPDX-License-Identifier: Apache-2.0
"""Trainers that NVFlare does not start: they attach to a job of a deployment, before or after it begins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import nvflare_lazy
from benchmarks import fl_job
from benchmarks.fl_job import FLJob, poc
from integration_tests.conftest import in_deployment, records, server_app
from integration_tests.expected import next_global, start, ulps
from nvflare_lazy.records import read_records
from tests.scratch.conftest import wait_until_empty

TRAINER = Path(fl_job.__file__).with_name("trainer.py")


class AttachJob(FLJob):
    """The job whose clients wait for trainers."""

    def client(self) -> dict[str, Any]:
        """Return the content of `config_fed_client.json`."""
        config = super().client()
        executor = config["executors"][0]["executor"]["args"]
        for name in ("command", "task_script_path", "task_script_args"):
            executor.pop(name, None)
        executor |= {"execution_mode": "attach", "attach_id": "trainer", "attach_timeout": 300.0}
        return config


@pytest.fixture
def trainers(tmp_path: Path, monkeypatch) -> Iterator[Any]:
    """Lets the sites of a deployment accept trainers through a directory, and starts these."""
    # The path of a file that a process connects to must be short.
    meeting_point = tmp_path / "attach"
    meeting_point.mkdir(mode=0o770)
    listener = {"scheme": "shared-file", "resources": {"root_dir": str(meeting_point), "connection_security": "clear"}}
    provision = poc.provision

    def provision_with_listeners(directory: Path, clients: int) -> None:
        provision(directory, clients)
        for local in directory.glob("example_project/prod_00/site-*/local"):
            path = local / "comm_config.json"
            config = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps({**config, "client_api_attach": listener}))

    monkeypatch.setattr(poc, "provision", provision_with_listeners)
    with ExitStack() as running:

        def begin(site: str, scratch: Path, *arguments: str) -> None:
            profile = tmp_path / f"{site}.json"
            content = {"schema_version": 1, "execution_mode": "attach", "attach_id": "trainer", "site_name": site}
            profile.write_text(json.dumps({**content, "rendezvous_dir": str(meeting_point), "job_wait_timeout": None}))
            output = running.enter_context(open(tmp_path / f"{site}-trainer.txt", "w"))
            process = subprocess.Popen(
                [sys.executable, TRAINER, "--config", profile, *arguments],
                env={
                    **os.environ,
                    "NVFLARE_LAZY_SCRATCH": str(scratch),
                    "NVFLARE_LAZY_RECORDS": str(tmp_path / f"{site}.jsonl"),
                },
                cwd=tmp_path,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            running.callback(process.wait)
            running.callback(process.kill)

        yield begin


@in_deployment
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stock", "level-1", "level-3"])
def test_trainers_that_attach_to_a_job(tmp_path: Path, trainers: Any, mode: str):
    """The result is right at each level, received on disk, and nothing is left behind."""
    job = AttachJob(mode=mode, model_mib=1, tensors=4, rounds=2)
    arguments = ["--install"] if mode == "level-3" else []
    begun = []

    def begin_trainers(deployment: Any, job_id: str) -> None:
        if not begun:
            begun.extend(["site-1", "site-2"])
            for site in begun:
                trainers(site, tmp_path / "scratch", *arguments)

    result = poc.run_in_poc(job, tmp_path, during=begin_trainers, timeout=300)
    outputs = [path.read_text() for path in tmp_path.glob("site-*-trainer.txt")]
    assert result.ok, (result.output[-3000:], *(output[-2000:] for output in outputs))
    saved = (
        nvflare_lazy.open(server_app(result) / "FL_global_model.safetensors")
        if mode == "level-3"
        else torch.load(server_app(result) / "FL_global_model.pt")["model"]
    )
    value = start(2, job.elements)
    for _ in range(job.rounds):
        exact = next_global(value, [1, 2])
        value = exact.astype("float32")
    assert ulps(saved["layer00002"].numpy(), exact) <= (1 if mode == "level-3" else 8)
    if mode != "stock":
        assert [(part["on_disk"], part["accepted"]) for part in records(result, "contribution")] == [(True, True)] * 4
    if mode == "level-3":
        for site in (1, 2):
            transfers = read_records(tmp_path / f"site-{site}.jsonl").transfers
            print([(part.direction, part.nbytes, part.way) for part in transfers])
            assert [part.direction for part in transfers] == ["received", "sent"] * 2
            # Whole tensors have headers.
            assert all(1 << 20 <= part.nbytes <= (1 << 20) + 4096 for part in transfers)
    assert " - ERROR - " not in result.server_log
    wait_until_empty(tmp_path / "scratch")
