# SPDX-License-Identifier: Apache-2.0
"""Peak anonymous memory of the server's process: the numbers the project promises, measured on real jobs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import fl_job
from benchmarks.fl_job import MIB, FLJob, RunResult, run_in_simulator
from benchmarks.fl_job.poc import run_in_poc
from integration_tests.conftest import in_deployment

GIB = 1024
FL_JOB = Path(fl_job.__file__).parent


@pytest.fixture
def peak(tmp_path: Path):
    """Runs a job and returns the peak of its server in bytes."""

    def peak(**job: object) -> int:
        directory = tmp_path / "run"
        directory.mkdir()
        result: RunResult = run_in_simulator(FLJob(**job), directory)
        shutil.rmtree(directory)
        assert result.ok, result.output[-3000:]
        print(result.summary())
        return result.server_peak

    return peak


def test_the_server_stays_flat_with_the_plugin_everywhere(peak):
    """In short: two clients with 160 MiB each cost the server less than 128 MiB over an idle job."""
    idle = peak(mode="level-3", clients=2, model_mib=0.03, tensors=16, rounds=1)
    assert peak(mode="level-3", clients=2, model_mib=160, tensors=16, rounds=1) <= idle + 128 * MIB


@pytest.mark.slow
def test_the_server_stays_flat_with_a_model_of_a_gibibyte(peak):
    """64 tensors of 16 MiB, two rounds: with stock clients within 384 MiB of idle, with the plugin there within 192."""
    idle = peak(mode="level-2", clients=4, model_mib=0.03, tensors=64)
    four = peak(mode="level-2", clients=4, model_mib=GIB, tensors=64)
    assert four <= idle + 384 * MIB
    assert peak(mode="level-3", clients=4, model_mib=GIB, tensors=64) <= idle + 192 * MIB
    assert four <= 1.1 * peak(mode="level-2", clients=2, model_mib=GIB, tensors=64)


@pytest.mark.slow
def test_eight_times_the_model_is_the_same_memory(peak):
    """From 256 MiB to 2 GiB, in tensors of the same size, the server grows by 64 MiB at most."""
    small = peak(mode="level-3", clients=2, model_mib=256, tensors=16)
    assert peak(mode="level-3", clients=2, model_mib=2 * GIB, tensors=128) <= small + 64 * MIB


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "clients", "mib"), [("level-2", 1, 256), ("level-2", 16, 64), ("level-3", 1, 256)])
def test_the_server_stays_flat_with_any_number_of_clients(peak, mode, clients, mib):
    """With one client and with sixteen, a server grows by 192 MiB at most."""
    idle = peak(mode=mode, clients=clients, model_mib=0.03, tensors=mib // 4)
    assert peak(mode=mode, clients=clients, model_mib=mib, tensors=mib // 4) <= idle + 192 * MIB


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "mib"), [(16, 256), (1, 4 * GIB)])
def test_the_server_stays_flat_with_trainers_that_hold_one_tensor(peak, clients, mib):
    """The machine needs memory for a few tensors of each client, which permits many clients and a large model."""
    job = {"mode": "level-3", "clients": clients, "trainer": FL_JOB / "streaming_trainer.py"}
    idle = peak(**job, model_mib=0.03, tensors=64)
    assert peak(**job, model_mib=mib, tensors=64) <= idle + 192 * MIB


@in_deployment
@pytest.mark.slow
def test_a_deployment_with_external_trainers_stays_flat(tmp_path: Path):
    """Server job as in the simulator; the clients' job processes, which only forward, grow by 64 MiB at most."""
    peaks = []
    for number, size in enumerate((0.03, 512)):
        directory = tmp_path / str(number)
        directory.mkdir()
        job = FLJob(mode="level-3", clients=2, model_mib=size, tensors=32, external=True)
        result = run_in_poc(job, directory)
        assert result.ok, result.output[-3000:]
        print(result.summary())
        peaks.append((result.server_peak, result.client_peak))
    (idle_server, idle_client), (server, client) = peaks
    assert server <= idle_server + 192 * MIB
    assert client <= idle_client + 64 * MIB
