# SPDX-License-Identifier: Apache-2.0
"""A client job between the server and its trainer: it takes what the trainer gives, and gives what the server sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nvflare_lazy
from benchmarks.fl_job import FLJob, RunResult
from benchmarks.fl_job.poc import run_in_poc
from integration_tests.conftest import JobRunner, in_deployment, server_app
from integration_tests.expected import next_global, start, ulps
from nvflare_lazy.records import FILE_NAME, read_records
from tests.scratch.conftest import wait_until_empty

HOP = Path(__file__).parent / "hop"
MIB = 1 << 20


class HopJob(FLJob):
    """The trainers' command says `install()`, and the clients ask soon again whether a result is still wanted.

    The options of the component are for the server only.
    """

    def client(self) -> dict[str, Any]:
        config = super().client()
        config["components"][0]["args"] = {}
        executor = config["executors"][0]["executor"]["args"]
        python, unbuffered, script, *_ = executor["command"]
        executor["command"] = [python, unbuffered, "-m", "nvflare_lazy.flare.install", script]
        config["components"] += [{"id": "lossy", "path": "lossy.LosesResults"}]
        return {**config, "task_check_interval": 0.2}


def hop_job(**more: Any) -> HopJob:
    files = (HOP / "lossy.py",)
    described = {"model_mib": 16, "tensors": 4, "rounds": 2, "trainer": HOP / "leaving_trainer.py", **more}
    return HopJob(mode="level-3", external=True, files=files, **described)


def check_model(result: RunResult) -> None:
    value = start(2, result.job.elements)
    for _ in range(result.job.rounds):
        exact = next_global(value, [1, 2])
        value = exact.astype("float32")
    saved = nvflare_lazy.open(server_app(result) / "FL_global_model.safetensors")
    assert ulps(saved["layer00002"].numpy(), exact) <= 1


def check_client_records(result: RunResult) -> None:
    """Check that each client has the bytes, seconds, transport and round of the transfers of its processes."""
    nbytes = int(result.job.model_mib * MIB)
    for path in result.workspace.glob(f"site-*/simulate_job/{FILE_NAME}"):
        found = read_records(path)
        assert found.damaged == 0
        assert found.end is not None
        assert [task.round for task in found.tasks] == [0, 1]
        by_trainer = [each for each in found.transfers if each.process == "trainer"]
        assert [each.round for each in by_trainer if each.direction == "received"] == [0, 1]
        assert [each.round for each in by_trainer if each.direction == "sent"] == [0, 1]
        of_results = [each for each in found.transfers if each.process == "job" and each.direction == "received"]
        assert any("trainer" in each.peer for each in of_results)
        assert all((each.nbytes, each.seconds < result.seconds) == (nbytes, True) for each in found.transfers)
        assert {each.way for each in found.transfers} <= {"by handoff", "in segments"}
        assert {sample.process for sample in found.samples} == {"job", "trainer"}


@pytest.mark.slow
@pytest.mark.parametrize("launch_once", [True, False])
def test_trainer_that_leaves_and_a_result_that_is_lost(run_job: JobRunner, tmp_path: Path, launch_once: bool):
    """The client job has the result when the trainer's `send` returns, and sends it until it arrives."""
    elsewhere = tmp_path / "elsewhere"
    result = run_job(hop_job(executor={"launch_once": launch_once}, offload={"scratch_dir": str(elsewhere)}))
    check_model(result)
    assert result.output.count("has sent everything") == 2
    assert result.output.count("lost a result") == 4
    assert result.output.count("received LazyTensor") == 4
    taken = [line for line in result.output.splitlines() if " - INFO - Received " in line and "trainer_" in line]
    assert len(taken) == 4
    assert all("by handoff, on disk" in line for line in taken)
    check_client_records(result)
    wait_until_empty(result.workspace.parent / "scratch")
    wait_until_empty(elsewhere)


@in_deployment
@pytest.mark.slow
def test_server_on_another_host(tmp_path: Path):
    """In a deployment whose server shares no scratch, the client job takes tasks from the second round on.

    Its memory stays within 64 MiB of a client job without a model to speak of.
    """
    peaks = []
    for model_mib in (256, 1):
        directory = tmp_path / str(model_mib)
        directory.mkdir()
        result = run_in_poc(
            hop_job(model_mib=model_mib, rounds=3), directory, server_scratch=directory / "elsewhere", timeout=300
        )
        assert result.ok, result.output[-3000:]
        check_model(result)
        peaks.append(max(sample.anon for sample in result.samples if sample.role.startswith("client")))
        logs = [path.read_text() for path in result.workspace.glob("site-*/log.txt")]
        print([[line for line in log.splitlines() if "Received " in line] for log in logs])
        wait_until_empty(directory / "scratch")
        wait_until_empty(directory / "elsewhere")
    print(f"a client job takes {peaks[0] / MIB:.0f} MiB at most, without a model {peaks[1] / MIB:.0f}")
    assert peaks[0] <= peaks[1] + 64 * MIB
