# SPDX-License-Identifier: Apache-2.0
"""The log of rounds: the records of a round, whatever happens in it and wherever they are written."""

from __future__ import annotations

import json

import pytest

from nvflare_lazy.flare.round_log import RoundLog
from nvflare_lazy.records import TransferRecord


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_round_in_which_everything_happens(tmp_path):
    """One result is used, one refused, one skipped while it is combined, one missing: each with its first reason."""
    said, measured = [], []
    log = RoundLog(tmp_path / "log.jsonl", said.append, measured.append)
    log.start_round(4)
    for client in ("a", "b", "c", "d"):
        log.on_task_sent(client)
    for client in ("a", "b", "c"):
        log.on_result(client, 1 << 20, 2, on_disk=True)
    log.on_skip("b", "of another shape")
    log.on_skip("b", "a later reason")
    log.on_verdict("a", accepted=True)
    log.on_verdict("b", accepted=False)
    log.on_verdict("c", accepted=True)
    log.on_skip("c", "NaN in it")
    log.on_aggregated(0.5, ["a"])
    transport = {"in segments": 1 << 20, "by handoff": 2 << 20}
    record = log.end_round(scratch_bytes=1, scratch_peak_bytes=3 << 20, transport=transport)
    assert record.aggregated == ["a"]
    assert record.transport == transport
    assert record.skipped == {"b": "of another shape", "c": "NaN in it", "d": "no result received"}
    assert (record.received_bytes, record.scratch_peak_bytes) == (3 << 20, 3 << 20)
    written = lines(tmp_path / "log.jsonl")
    assert [line["kind"] for line in written] == ["contribution"] * 3 + ["round"]
    assert [line.get("accepted") for line in written] == [True, False, True, None]
    assert written[1]["reason"] == "of another shape"
    assert len(said) == 4
    assert said[0].startswith("Round 4: received the result of a after 0.0 s: 1.0 MiB in 2 tensors, on disk; memory ")
    assert said[1].endswith("; not used: of another shape")
    assert (
        "(aggregation 0.5 s): aggregated 1 of 4 results, received 3.0 MiB (2.0 MiB by handoff, 1.0 MiB in segments); "
        in said[3]
    )
    assert said[3].endswith("skipped: b (of another shape); c (NaN in it); d (no result received)")
    assert measured == [record]
    assert {name: measured[0].numbers()[name] for name in ("aggregated", "skipped")} == {"aggregated": 1, "skipped": 3}


@pytest.mark.parametrize("reported", [True, False], ids=["LazyAggregator", "NVFlare's aggregation"])
def test_further_results_of_a_client_do_not_hide_its_contribution(tmp_path, reported):
    """A rejected result for an unknown task, before or after the accepted one: the model has the accepted one."""
    log = RoundLog(tmp_path / "log.jsonl", lambda line: None)
    log.start_round(0)
    log.on_skip("a", "for an unknown task")
    log.on_verdict("a", accepted=True)
    log.on_verdict("b", accepted=True)
    log.on_skip("b", "a second result")
    log.on_verdict("b", accepted=False)
    log.on_verdict("c", accepted=False)
    if reported:
        log.on_aggregated(0.5, ["a", "b"])
    record = log.end_round()
    assert record.aggregated == ["a", "b"]
    assert record.skipped == {"c": "rejected by the controller or aggregator"}


def test_a_round_that_leaves_the_model_unchanged(tmp_path):
    """No result is aggregated, and each client has a reason."""
    log = RoundLog(tmp_path / "log.jsonl", lambda line: None)
    log.start_round(0)
    for client in ("a", "b"):
        log.on_verdict(client, accepted=True)
    log.on_skip("b", "NaN in it")
    log.on_aggregated(0.5, [])
    record = log.end_round()
    assert record.aggregated == []
    assert record.skipped == {"a": "not aggregated", "b": "NaN in it"}


def test_a_round_is_ended_once(tmp_path):
    """Several events may mean its end; the first one does it."""
    log = RoundLog(tmp_path / "log.jsonl", lambda line: None)
    assert log.end_round() is None
    log.start_round(0)
    assert log.end_round() is not None
    assert log.end_round() is None
    assert len(lines(tmp_path / "log.jsonl")) == 1


def test_a_job_goes_on_when_records_cannot_be_written(tmp_path):
    """It warns a single time, and the other lines follow."""
    said, warned = [], []
    log = RoundLog(tmp_path, said.append, warn=warned.append)
    for number in range(2):
        log.start_round(number)
        log.end_round()
    [warning] = warned
    assert "records of this job will be incomplete" in warning
    assert len(said) == 2


def test_a_client_that_does_not_answer(tmp_path):
    """It is listed in the rounds after it as well, until it answers or takes another task."""
    said = []
    log = RoundLog(None, said.append, explain=lambda client: f"; see the log of {client}")
    log.start_round(0)
    for client in ("a", "b", "c"):
        log.on_task_sent(client)
    for client in ("a", "b"):
        log.on_result(client, 1, 1, on_disk=True)
        log.on_verdict(client, accepted=True)
    assert log.outcomes(["a", "b", "c", "d"]) == (
        "c (no result received; see the log of c); d (had no task in this round); a, b (accepted)"
    )
    assert log.end_round().skipped == {"c": "no result received; see the log of c"}
    log.start_round(1)
    log.on_task_sent("a")
    log.on_answer("a")
    log.on_skip("a", "its task ended with 'ERROR'", failed=True)
    log.on_verdict("a", accepted=False)
    log.on_lost("c")
    log.on_failure()
    assert log.end_round().skipped == {
        "a": "its task ended with 'ERROR'; see the log of a",
        "c": "lost: no contact since round 0; see the log of c",
    }
    assert said[-1].startswith("Round 1 failed after 0.0 s: aggregated 0 of 1 results")
    log.start_round(2)
    log.on_task_sent("c")
    log.on_answer("c")
    assert log.end_round().skipped == {}
    assert log.outcomes() == ""


def test_transfers_of_a_client(tmp_path):
    """Seconds and transport of a client's payloads, even behind a relay; a client without payloads has no entry."""
    log = RoundLog(tmp_path / "log.jsonl", lambda line: None)
    log.start_round(0)
    sent = [("a.job", 1.0, "in segments"), ("relay.b.job.trainer", 2.0, "by handoff")]
    for peer, _, _ in sent:
        log.on_transfer(TransferRecord(direction="received", peer=peer, seconds=99.0, way="of an earlier task"))
    for client in ("a", "b", "c"):
        log.on_task_sent(client)
    for peer, seconds, way in sent:
        log.on_transfer(TransferRecord(direction="sent", peer=peer, seconds=0.5, way=way))
        for _ in range(2):  # a payload of tensors and one of arrays
            log.on_transfer(TransferRecord(direction="received", peer=peer, seconds=seconds, way=way))
    for client in ("a", "b", "c"):
        log.on_result(client, 10, 1, on_disk=True)
        log.on_metrics(client, {"loss": 0.5})
        log.on_verdict(client, accepted=True)
    record = log.end_round()
    found = {name: (each.task_seconds, each.transfer_seconds, each.way) for name, each in record.clients.items()}
    assert found == {"a": (0.5, 2.0, "in segments"), "b": (0.5, 4.0, "by handoff"), "c": (None, None, None)}
    assert {name: each.metrics for name, each in record.clients.items()} == {name: {"loss": 0.5} for name in "abc"}
