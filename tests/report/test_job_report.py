# SPDX-License-Identifier: Apache-2.0
"""The numbers and the answers of a report, against records whose numbers are known."""

from __future__ import annotations

from html import unescape
from pathlib import Path

import pytest

from nvflare_lazy.errors import RecordsError
from nvflare_lazy.records import FILE_NAME, ContributionRecord, EndRecord, RoundRecord
from nvflare_lazy.report import answers, read_job, summarize
from tests.report.jobs import BEGIN, MIB, client_records, server_records, simulated, write

PAGES = Path(__file__).parents[2] / "docs" / "results" / "reports"
NAN = "3 values are not finite, the first one in 'layer.1'"


def told(workspace: Path) -> dict[str, str]:
    return {answer.name: answer.text for answer in answers(summarize(read_job(workspace), made=BEGIN + 60))}


def test_the_answers_of_a_finished_job(tmp_path: Path):
    """The slow and the skipped clients, the peak, the disk of a next run, the model, the transport."""
    model = tmp_path / "workspace" / "server" / "simulate_job" / "app_server" / "model.safetensors"
    workspace = simulated(tmp_path / "workspace", skipped={1: {"site-3": NAN}}, model="/elsewhere/model.safetensors")
    model.parent.mkdir()
    model.write_bytes(bytes(MIB))
    assert told(workspace) == {
        "State": "finished; 3 rounds in 31.0 s",
        "Slowest client": "site-2; median 8.0 s, 0.5 s of it transfer; last in 3 of 3 rounds; "
        "without it the rounds take 18.0 s less (60%)",
        "Skipped": f"1 client, 1 result; site-3 in round 1: {NAN}",
        "Memory peak": "240.0 MiB in server; in round 2, 28.0 s after the start (2026-01-02 03:04:33 UTC); "
        "highest of all processes: site-1 trainer, 300.0 MiB",
        "Disk for a next run": "902.0 MiB of scratch; server 302.0 MiB, each client up to 100.0 MiB, "
        "each trainer up to 100.0 MiB, all on one disk in the worst case; the highest peak was 26.0 s after the start; "
        "plus 1.0 MiB for each model that it saves; at the start, 48.8 GiB were free",
        "Model": f"model.safetensors; {model}: 1.0 MiB, saved by server after round 2",
        "Transport": "in segments; 900.0 MiB received: in segments 900.0 MiB",
    }


def test_a_job_that_runs_or_was_killed(tmp_path: Path):
    """No record of its end and an incomplete last line: the answers use the complete records."""
    path = write(tmp_path / FILE_NAME, server_records(rounds=(0, 1), ended=False))
    running = ContributionRecord(time=BEGIN + 25, client="site-1", round=2, nbytes=MIB, seconds=5.0)
    write(tmp_path / "more", [running])
    path.write_bytes(path.read_bytes() + (tmp_path / "more").read_bytes() + b'{"kind": "round", "ti')
    report = summarize(read_job(path), made=BEGIN + 60)
    assert answers(report)[0].text == (
        "running or killed; 2 rounds in 25.0 s; no record of its end; last record 35.0 s before this report"
    )
    assert report.processes[0].damaged == 1
    assert report.clients[0].seconds == {0: 2.0, 1: 2.0, 2: 5.0}


def test_a_resumed_job(tmp_path: Path):
    """Charts omit time without a running job, and repeated rounds count once."""
    records = server_records(rounds=(0, 1), ended=False) + server_records(begin=BEGIN + 7200, rounds=(1, 2))
    report = summarize(read_job(write(tmp_path / FILE_NAME, records)))
    assert [(start.seconds, start.down_seconds) for start in report.starts] == [(0.0, 0.0), (18.0, 7182.0)]
    assert [(each.number, each.end) for each in report.rounds] == [(0, 10.0), (1, 28.0), (2, 38.0)]
    assert report.running_seconds == 39.0
    assert max(point.seconds for point in report.processes[0].memory) == 38.0
    assert answers(report)[0].text == "finished; 3 rounds in 39.0 s, resumed once"


def test_swarm_learning(tmp_path: Path):
    """The clients aggregate: their rounds are combined, and the peak is the highest client's."""
    for place, site in enumerate(("site-1", "site-2")):
        own = client_records(site, rounds=(0,))[:-1]
        aggregated = server_records(begin=BEGIN + 10 * place, rounds=(place,), model=f"/{site}/model.safetensors")[1:]
        write(tmp_path / site / "simulate_job" / FILE_NAME, own + aggregated)
    write(tmp_path / "server" / "simulate_job" / FILE_NAME, [*server_records(rounds=())])
    report = summarize(read_job(tmp_path))
    assert [(each.number, each.site) for each in report.rounds] == [(0, "site-1"), (1, "site-2")]
    assert report.model is not None
    assert report.model.path == "/site-2/model.safetensors"
    assert {answer.name: answer.short for answer in answers(report)}["Memory peak"] == "300.0 MiB in site-1 trainer"


def test_no_client_is_called_slow_without_a_reason(tmp_path: Path):
    """Clients that take the same time, one client, and records without any result."""
    same = write(tmp_path / "same" / FILE_NAME, server_records(slow=""))
    assert told(same)["Slowest client"].startswith("no slow client; ")
    one = write(tmp_path / "one" / FILE_NAME, server_records(clients=["site-1"]))
    assert told(one)["Slowest client"] == "site-1; the only one, 2.0 s for a result"
    none = write(
        tmp_path / "none" / FILE_NAME, [*server_records(rounds=()), EndRecord(status="failed", reason="no model")]
    )
    found = told(none)
    assert found["State"].startswith("failed; 0 rounds in ")
    assert found["State"].endswith(": no model")
    assert found["Slowest client"].startswith("unknown")
    assert found["Model"] == "not recorded; no round has saved a model with LazyModelPersistor"
    assert found["Skipped"] == "none; no round has ended"


def test_records_without_the_reasons_of_all_results(tmp_path: Path):
    """The number of skipped results is the total of all rounds, even if the file was thinned."""
    records = server_records(skipped={0: {"site-3": NAN}, 1: {"site-3": NAN}})
    next(each for each in records if isinstance(each, RoundRecord)).skipped = {}
    assert told(write(tmp_path / FILE_NAME, records))["Skipped"] == (
        f"at least 1 client, 2 results; site-3 in round 1: {NAN}; the records have no reasons for 1 result"
    )


def test_rounds_without_numbers(tmp_path: Path):
    """Each one counts for the times of a client."""
    records = server_records(rounds=(0, 1, 2), slow="")
    for place, record in enumerate(each for each in records if isinstance(each, RoundRecord)):
        record.round, record.clients["site-1"].seconds = None, 1.0 + place
    (client, *_) = summarize(read_job(write(tmp_path / FILE_NAME, records))).clients
    assert (client.median_seconds, client.seconds) == (2.0, {0: 1.0, 1: 2.0, 2: 3.0})


def test_records_of_a_server_that_could_not_write(tmp_path: Path):
    """The times are the clients' times; without any record, no report is written."""
    write(tmp_path / "server" / "simulate_job" / FILE_NAME, [])
    with pytest.raises(RecordsError, match=r"no line of .*nvflare_lazy\.jsonl is a record"):
        summarize(read_job(tmp_path))
    write(tmp_path / "site-1" / "simulate_job" / FILE_NAME, client_records("site-1"))
    report = summarize(read_job(tmp_path))
    assert (report.started, report.running_seconds) == (BEGIN, 31.0)


@pytest.mark.parametrize("status", ["aborted", "failed"])
def test_the_end_of_a_job_that_did_not_finish(tmp_path: Path, status: str):
    """The state is a problem, with the reason that was recorded."""
    records = [
        *server_records(rounds=(0,), ended=False),
        EndRecord(time=BEGIN + 11, status=status, reason="a\x1b[31m<b>"),
    ]
    (state, *_) = answers(summarize(read_job(write(tmp_path / FILE_NAME, records))))
    assert state.is_problem
    assert state.text == f"{status}; 1 round in 11.0 s: a\\x1b[31m<b>"


@pytest.mark.parametrize("name", ["demo", "skipped", "resumed", "swarm"])
def test_the_committed_pages(name: str):
    """They are small, and have the answers that their records give today."""
    page = (PAGES / f"{name}.html").read_text(encoding="utf-8")
    assert len(page) < 150_000
    text = unescape(page)
    found = answers(summarize(read_job(PAGES / f"{name}.zip")))
    assert [answer.name for answer in found if answer.short not in text or answer.detail not in text] == []
    assert {answer.name for answer in found if answer.is_problem} == ({"Skipped"} if name == "skipped" else set())
