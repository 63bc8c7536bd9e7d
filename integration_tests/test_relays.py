# SPDX-License-Identifier: Apache-2.0
"""A deployment whose sites connect to a relay instead of the server."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from nvflare.tool.poc import poc_commands

import nvflare_lazy
from benchmarks.fl_job import FLJob, poc
from integration_tests.conftest import in_deployment, records, server_app
from integration_tests.expected import next_global, start, ulps
from tests.scratch.conftest import wait_until_empty


@in_deployment
@pytest.mark.slow
def test_a_job_through_a_relay(tmp_path: Path, monkeypatch):
    """Every tensor crosses one more process, which only forwards; results arrive on disk, and the model is right."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    prepared, begin = poc_commands.local_provision, poc.Deployment.start

    def with_relay(*arguments: Any, project_conf_path: str, **others: Any) -> Any:
        path = Path(project_conf_path)
        project = yaml.safe_load(path.read_text())
        for participant in project["participants"]:
            if participant["type"] == "client":
                participant["connect_to"] = {"name": "relay"}
        listening = {"scheme": "tcp", "host_names": ["127.0.0.1"], "default_host": "localhost", "port": port}
        relay = {"name": "relay", "type": "relay", "org": "example", "listening_host": listening}
        project["participants"].insert(1, relay)
        path.write_text(yaml.safe_dump(project))
        return prepared(*arguments, project_conf_path=project_conf_path, **others)

    def start_with_relay(deployment: poc.Deployment, name: str) -> None:
        begin(deployment, name)
        if name == "localhost":
            begin(deployment, "relay")

    monkeypatch.setattr(poc_commands, "local_provision", with_relay)
    monkeypatch.setattr(poc.Deployment, "start", start_with_relay)
    job = FLJob(mode="level-3", model_mib=8, tensors=4, rounds=2, external=True)
    # The server shares no scratch with the sites, or nothing would cross the relay.
    result = poc.run_in_poc(job, tmp_path, timeout=300, server_scratch=tmp_path / "elsewhere")
    assert result.ok, result.output[-3000:] + (tmp_path / "relay.txt").read_text()[-3000:]
    saved = nvflare_lazy.open(server_app(result) / "FL_global_model.safetensors")
    value = start(2, job.elements)
    for _ in range(job.rounds):
        exact = next_global(value, [1, 2])
        value = exact.astype("float32")
    assert ulps(saved["layer00002"].numpy(), exact) <= 1
    assert [(part["on_disk"], part["accepted"]) for part in records(result, "contribution")] == [(True, True)] * 4
    assert "in segments" in result.server_log
    assert " - ERROR - " not in result.server_log
    wait_until_empty(tmp_path / "scratch")
    wait_until_empty(tmp_path / "elsewhere")
