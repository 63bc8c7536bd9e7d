# SPDX-License-Identifier: Apache-2.0
"""A trainer that loads the global model tensor by tensor: it needs no second model, neither to receive nor to send."""

from __future__ import annotations

import json
from pathlib import Path

import nvflare_lazy
from benchmarks.fl_job import MIB, FLJob
from integration_tests.conftest import JobRunner, server_app
from integration_tests.expected import next_global, start, ulps

MODEL_MIB = 256


def test_a_trainer_needs_no_second_model(run_job: JobRunner, tmp_path: Path):
    """With one line at the top of the script, 256 MiB come and go beside the model in less than half of that."""
    seen = tmp_path / "witness.jsonl"
    job = FLJob(
        mode="lazy-both",
        model_mib=MODEL_MIB,
        tensors=32,
        rounds=2,
        external=True,
        trainer=Path(__file__).parent / "measured_trainer.py",
    )
    result = run_job(job, environment={"WITNESS": str(seen), "SIZES": json.dumps([job.tensors, job.elements])})
    notes = [json.loads(line) for line in seen.read_text().splitlines()]
    assert len(notes) == job.clients * job.rounds
    most = max(note["beside the model"] for note in notes)
    print(f"receiving and sending {MODEL_MIB} MiB takes a trainer {most / MIB:.0f} MiB at most beside its model")
    assert most < MODEL_MIB / 2 * MIB
    value = start(5, job.elements)
    for _ in range(job.rounds):
        exact = next_global(value, [1, 2])
        value = exact.astype("float32")
    saved = nvflare_lazy.open(server_app(result) / "FL_global_model.safetensors")
    assert ulps(saved["layer00005"].numpy(), exact) <= 1
