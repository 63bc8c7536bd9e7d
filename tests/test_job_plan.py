# SPDX-License-Identifier: Apache-2.0
"""The plan of a job: against committed measurements, and what each option changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.planned_jobs import JOBS, compare
from nvflare_lazy.formats import save
from nvflare_lazy.job_plan import JobOptions, JobPlan, ModelSize

MIB = 1 << 20
MODEL = ModelSize(nbytes=1000 * MIB, stored=1000 * MIB, largest=100 * MIB, tensors=10, slot=1000 * MIB)
# `python -m benchmarks.planned_jobs --out tests/planned_jobs.json`; `integration_tests/test_planned_jobs.py` runs it.
MEASURED = json.loads((Path(__file__).parent / "planned_jobs.json").read_text())
_TOLERANCE = 0.15
# Control messages, which are all the traffic of a job whose tensors are handed over.
_SMALL_MIB = 2


def assert_within(compared: list[tuple[str, int, int]]) -> None:
    for name, planned, measured in compared:
        print(f"{name}: planned {planned} MiB, measured {measured} MiB")
    off = [each for each in compared if abs(each[1] - each[2]) > max(_SMALL_MIB, _TOLERANCE * each[2])]
    assert not off


def plan(**options: object) -> JobPlan:
    return JobPlan.of(MODEL, JobOptions(**{"clients": 4, "cores": 2, **options}))


def test_five_measured_jobs():
    """Disk, memory of each process and traffic are within 15 % of the measurements."""
    assert len(MEASURED["jobs"]) == len(JOBS)
    assert_within(compare(MEASURED))


@pytest.mark.parametrize(
    ("options", "scratch", "checkpoints"),
    [
        ({}, 4, 3),
        ({"keep_rounds": 3}, 4, 5),
        ({"sends_differences": True}, 4, 4),
        ({"optimizer": "fedavgm"}, 4, 7),
        ({"optimizer": "fedadam", "sends_differences": True}, 4, 10),
        ({"level": 1}, 5, 2),
        ({"environment": "sim"}, 0, 3),
        ({"environment": "sim", "separate_checkpoints": True}, 1, 3),
        ({"environment": "sim", "level": 2}, 4, 3),
        ({"external": True}, 4, 3),
    ],
)
def test_disk_of_the_server(options, scratch, checkpoints):
    """In models: results in scratch, unless they are handed over; kept rounds, best and next model, and states."""
    found = plan(**options)
    assert found.scratch("server") == scratch * MODEL.nbytes
    assert found.checkpoints("server") == checkpoints * MODEL.nbytes


@pytest.mark.parametrize(
    ("options", "client_job", "trainer"),
    [
        ({}, 1, None),
        ({"level": 2}, 0, None),
        ({"external": True}, 0, 0),
        ({"external": True, "install_in_trainers": True}, 1, 1),
        ({"external": True, "install_in_trainers": True, "level": 2}, 0, 1),
        ({"external": True, "install_in_trainers": True, "environment": "poc"}, 0, 1),
    ],
)
def test_disk_of_a_client(options, client_job, trainer):
    """In models: the global model, and the result if it is a file."""
    scratch = {process.process: process.scratch for process in plan(**options).processes if process.site == "client"}
    assert scratch["client job"] == client_job * MODEL.nbytes
    assert scratch.get("trainer") == (None if trainer is None else trainer * MODEL.nbytes)


def test_memory_of_the_server():
    """It does not depend on the model if both ends have the package, and stays within the budget with many cores."""
    small = JobPlan.of(replace(MODEL, nbytes=MIB, stored=MIB, largest=MIB), JobOptions(clients=4, cores=2))
    server = plan().processes[0].memory
    assert server == small.processes[0].memory
    assert plan(cores=64).processes[0].memory == server - 48 * MIB + 128 * MIB
    assert plan(level=2).processes[0].memory - server > MODEL.largest
    assert plan(level=1).processes[0].memory > 4 * MODEL.nbytes
    assert plan(rule="median", clients=500).processes[0].memory > server


def test_options_that_do_not_fit():
    """The error names the option."""
    with pytest.raises(ValueError, match="a rule or a server optimizer requires level 2 or 3"):
        JobOptions(clients=2, level=1, rule="median")
    with pytest.raises(ValueError, match="the rule bulyan requires 7 or more clients, got 2"):
        JobOptions(clients=2, rule="bulyan")
    with pytest.raises(ValueError, match="install_in_trainers requires external"):
        JobOptions(clients=2, install_in_trainers=True)
    with pytest.raises(ValueError, match="unknown server optimizer 'adam'"):
        JobOptions(clients=2, optimizer="adam")


def test_size_of_a_hugging_face_directory(tmp_path):
    """Tied tensors are stored one time and exchanged under both names; the state of an optimizer is float32."""
    words = torch.zeros(4096, 8, dtype=torch.bfloat16)
    save({"model.embed_tokens.weight": words, "steps": torch.tensor(1)}, tmp_path / "model.safetensors")
    config = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 4096, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = ModelSize.of(tmp_path)
    assert size == ModelSize(
        nbytes=2 * words.nbytes + 8, stored=words.nbytes + 8, largest=words.nbytes, tensors=3, slot=2 * words.nbytes
    )


def test_size_of_a_training_checkpoint(tmp_path):
    """The section of an NVFlare file with the model, or another section."""
    state = {"w": torch.zeros(100)}
    torch.save({"model": state, "optimizer": {"m": torch.zeros(700)}}, tmp_path / "nvflare.pt")
    assert ModelSize.of(tmp_path / "nvflare.pt").nbytes == 400
    assert ModelSize.of(tmp_path / "nvflare.pt", "optimizer").nbytes == 2800
    torch.save(state, tmp_path / "plain.pt")
    assert ModelSize.of(tmp_path / "plain.pt").nbytes == 400
