# SPDX-License-Identifier: Apache-2.0
"""The rounds of a job as lines for people, records for programs, and metrics for receivers of analytics."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.fl_job import MIB, FLJob
from integration_tests.conftest import JobRunner, records
from nvflare_lazy.flare.lazy_model_persistor import MODEL_NAME
from nvflare_lazy.records import FILE_NAME, read_records

WITNESS = Path(__file__).parent / "witnesses" / "witness.py"
LINE = re.compile(
    r"Round (\d): received the result of (site-\d) after [\d.]+ s: 1\.0 MiB in 4 tensors, on disk; memory"
)
END = re.compile(
    r"Round (\d) finished in [\d.]+ s \(aggregation [\d.]+ s\): "
    r"aggregated 2 of 3 results, received 3\.0 MiB as whole tensors; .*skipped: "
)


def test_every_round_is_told_three_times(run_job: JobRunner, tmp_path: Path):
    """INFO lines, JSON lines in the run directory and analytics events agree, even about the skipped client."""
    seen = tmp_path / "witness.jsonl"
    job = FLJob(
        mode="level-2",
        clients=3,
        model_mib=1,
        tensors=4,
        rounds=1,
        trainer=WITNESS.parents[1] / "faulty_trainer.py",
        components=({"id": "metrics", "path": "witness.MetricsWitness"},),
        files=(WITNESS,),
    )
    result = run_job(job, environment={"WITNESS": str(seen), "FAULTS": '{"2": "nan"}'})

    lines = [line for line in result.server_log.splitlines() if " - INFO - " in line]
    told = [match.groups() for line in lines if (match := LINE.search(line))]
    assert sorted(told) == [("0", f"site-{site}") for site in (1, 2, 3)]
    (end,) = [line for line in lines if END.search(line)]
    assert "site-2 (" in end
    assert "nan" in end

    contributions = {record["client"]: record for record in records(result, "contribution")}
    assert contributions.keys() == {"site-1", "site-2", "site-3"}
    for record in contributions.values():
        assert (record["nbytes"], record["tensors"], record["on_disk"], record["round"]) == (MIB, 4, True, 0)
        assert 0 < record["seconds"] < result.seconds
        assert 0 <= record["task_seconds"] < record["seconds"]
        assert 0 <= record["transfer_seconds"] < record["seconds"]
        assert record["way"] == "as whole tensors"
    (record,) = records(result, "round")
    assert record["received_bytes"] == 3 * MIB
    assert record["aggregated"] == ["site-1", "site-3"]
    assert record["skipped"].keys() == {"site-2"}
    assert record["scratch_peak_bytes"] >= 3 * MIB
    # Measured from outside, a few times a second, which can miss the buffers of a moment.
    peak_outside = result.server_peak + 32 * MIB
    assert 0 < record["memory_bytes"] <= peak_outside
    assert 0 < record["aggregation_seconds"] < record["seconds"] < result.seconds
    assert record["memory_bytes"] <= record["memory_peak_bytes"] <= peak_outside
    assert Path(record["model"]).name == MODEL_NAME

    found = read_records(result.server_run_dir / FILE_NAME)
    assert found.damaged == 0
    assert found.job is not None
    assert (found.job.role, found.job.settings["rule"]) == ("server", "mean")
    assert found.end is not None
    assert found.end.status == "finished"
    peak = max(found.samples, key=lambda sample: sample.memory_bytes)
    assert record["memory_peak_bytes"] - MIB <= peak.memory_bytes <= peak_outside
    assert found.starts[0].time <= peak.time <= found.end.time
    # A sample each half second, and one for each result.
    assert 1 <= len(found.samples) <= 3 * (found.end.time - found.starts[0].time) + 10

    notes = [json.loads(line) for line in seen.read_text().splitlines()]
    own = [note for note in notes if note["origin"] == "simulator_server"]
    metrics = {note["tag"].removeprefix("nvflare_lazy/"): note for note in own}
    assert len(metrics) == len(own)
    used = {note["origin"]: note["value"] for note in notes if note["tag"] == "nvflare_lazy/result_used"}
    assert used == {"site-1": 1, "site-2": 0, "site-3": 1}
    assert {note["step"] for note in notes} == {0}
    for name in ("received_bytes", "seconds", "aggregation_seconds", "memory_bytes", "scratch_bytes"):
        assert metrics[name]["value"] == record[name]
    assert metrics["aggregated"]["value"] == 2
    assert metrics["skipped"]["value"] == 1
