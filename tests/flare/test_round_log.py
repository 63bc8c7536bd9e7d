# SPDX-License-Identifier: Apache-2.0
"""The log of rounds by itself: what is written down of a round, whatever happens in it and wherever it is written."""

from __future__ import annotations

import json

from nvflare_lazy.flare.round_log import RoundLog


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_round_in_which_everything_happens(tmp_path):
    """One is taken, one refused, one left out while it is combined, one never came: each with its first reason."""
    said, measured = [], []
    log = RoundLog(tmp_path / "log.jsonl", said.append, measured.append)
    log.start_round(4)
    for client in ("a", "b", "c", "d"):
        log.sent(client)
    for client in ("a", "b", "c"):
        log.received(client, 1 << 20, 2, on_disk=True)
    log.left_out("b", "of another shape")
    log.left_out("b", "a later reason")
    log.settled("a", accepted=True)
    log.settled("b", accepted=False)
    log.settled("c", accepted=True)
    log.left_out("c", "NaN in it")
    log.aggregated(0.5, ["a"])
    record = log.end_round(scratch_bytes=1, scratch_peak_bytes=3 << 20)
    assert record.took_part == ["a"]
    assert record.left_out == {"b": "of another shape", "c": "NaN in it", "d": "no result came"}
    assert (record.received_bytes, record.scratch_peak_bytes) == (3 << 20, 3 << 20)
    written = lines(tmp_path / "log.jsonl")
    assert [line["kind"] for line in written] == ["contribution"] * 3 + ["round"]
    assert [line.get("accepted") for line in written] == [True, False, True, None]
    assert written[1]["reason"] == "of another shape"
    assert len(said) == 4
    assert said[0].startswith("round 4: result of a after 0.0 s: 1.0 MiB in 2 tensors, on disk; process memory ")
    assert said[1].endswith("; left out: of another shape")
    assert "aggregated in 0.5 s: 1 of 4 clients, 3.0 MiB received; " in said[3]
    assert said[3].endswith("left out: b (of another shape); c (NaN in it); d (no result came)")
    assert measured == [record]
    assert {name: measured[0].metrics()[name] for name in ("took_part", "left_out")} == {"took_part": 1, "left_out": 3}


def test_a_round_is_ended_once(tmp_path):
    """Several events may mean its end; the first one does it."""
    log = RoundLog(tmp_path / "log.jsonl", lambda line: None)
    assert log.end_round() is None
    log.start_round(0)
    assert log.end_round() is not None
    assert log.end_round() is None
    assert len(lines(tmp_path / "log.jsonl")) == 1


def test_a_job_goes_on_when_records_cannot_be_written(tmp_path):
    """It says so once, and goes on saying the rest."""
    said = []
    log = RoundLog(tmp_path, said.append)
    for number in range(2):
        log.start_round(number)
        log.end_round()
    assert [line for line in said if "going on without records" in line] == said[:1]
    assert len(said) == 3
