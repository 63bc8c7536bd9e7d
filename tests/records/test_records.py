# SPDX-License-Identifier: Apache-2.0
"""Records are read as they were written, whatever happened to the writer, and a file stays small."""

from __future__ import annotations

import json
import multiprocessing
import os
import time

import pytest

from nvflare_lazy.errors import RecordsError
from nvflare_lazy.records import (
    SCHEMA,
    ContributionRecord,
    EndRecord,
    JobRecord,
    RecordWriter,
    RoundRecord,
    SampleRecord,
    TaskRecord,
    TransferRecord,
    read_records,
)
from nvflare_lazy.records.schema import MAX_ENTRIES
from tests.scratch.conftest import small_disk as small_disk

HOSTILE = "site\n\x1b[31m\u202e<script>\ud800"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "nvflare_lazy.jsonl"


def write(path, *records, **options):
    errors = []
    writer = RecordWriter(path, errors.append, **options)
    for record in records:
        writer.write(record)
    assert errors == []
    return writer


def test_all_kinds_are_read_as_they_were_written(path):
    """Every field of every kind; the contributions of a round that has ended are in its record."""
    job = JobRecord(job="a", site="server", role="server", versions={"torch": "2"}, settings={"quota": None, "n": 1})
    first = ContributionRecord(client="b", round=0, nbytes=3, seconds=1.5, metrics={"loss": 0.25}, accepted=True)
    ended = RoundRecord(round=0, clients={"b": first}, skipped={"c": "late"}, counts={"skipped": 1}, model="/x")
    running = ContributionRecord(client="b", round=1, accepted=False, reason="NaN")
    sample, task = SampleRecord(memory_bytes=5), TaskRecord(task="train", round=0, time=10.0)
    transfer = TransferRecord(direction="sent", peer="server", nbytes=7, way="in segments", seconds=1.0, time=12.5)
    transfer.process = "trainer"
    write(path, job, task, sample, first, ended, running, transfer, EndRecord(status="failed", reason="no"))
    records = read_records(path)
    assert records.job == job
    (found,) = records.rounds
    assert found.clients["b"].metrics == {"loss": 0.25}
    found.clients["b"].time, found.clients["b"].round = first.time, 0
    assert found == ended
    assert (records.contributions, records.samples, records.tasks) == ([running], [sample], [task])
    transfer.round = 0  # by the time
    assert records.transfers == [transfer]
    assert records.end is not None
    assert (records.end.reason, records.damaged) == ("no", 0)


DAMAGED = [
    b'{"kind": "round", "rou',
    b'{"kind": "round", "round": "x"}\n',
    b'{"kind": "round", "seconds": 1' + b"0" * 400 + b"}\n",
    b"[1]\n",
    b"\xff\n",
]


@pytest.mark.parametrize("rest", DAMAGED, ids=range(len(DAMAGED)))
def test_lines_that_cannot_be_read_are_skipped(path, rest):
    """A line that a kill has cut, or that is not a record; the next line begins on its own."""
    writer = write(path, RoundRecord(round=0))
    with open(path, "ab") as file:
        file.write(rest)
    writer.write(RoundRecord(round=1))
    records = read_records(path)
    assert ([each.round for each in records.rounds], records.damaged) == ([0, 1], 1)


def test_unknown_fields_and_kinds_are_ignored_and_newer_versions_are_not(path):
    """What a later version may add does no harm; a version whose meaning changed is an error that tells what to do."""
    lines = [{"kind": "round", "round": 0, "color": 1}, {"kind": "dance", "time": 1}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = read_records(path)
    assert (len(records.rounds), records.damaged) == (1, 0)
    write(path, JobRecord(schema=SCHEMA + 1))
    with pytest.raises(RecordsError, match="upgrade nvflare-lazy"):
        read_records(path)
    with pytest.raises(RecordsError, match=r"cannot read the records .*nowhere"):
        read_records(path.with_name("nowhere"))


def test_a_resumed_job_replaces_the_rounds_that_it_repeats(path):
    """Killed in round 2, resumed with round 1; a transfer or task of the lost rounds does not count twice."""
    write(path, JobRecord(time=1.0))
    for number in range(3):
        task = TaskRecord(task="train", round=number, time=2.0 + number)
        sent = TransferRecord(direction="sent", nbytes=1, round=number, time=2.5 + number)
        write(path, task, sent, RoundRecord(round=number, seconds=1.0, time=2.75 + number))
    write(path, ContributionRecord(client="a", round=3), JobRecord(time=10.0))
    assert read_records(path).contributions == []
    write(path, *(RoundRecord(round=number, seconds=2.0, time=11.0 + number) for number in (1, 2)))
    records = read_records(path)
    assert [(each.round, each.seconds) for each in records.rounds] == [(0, 1.0), (1, 2.0), (2, 2.0)]
    assert [each.round for each in records.transfers] == [each.round for each in records.tasks] == [0]
    assert len(records.starts) == 2


def test_a_client_in_several_processes(path):
    """A simulator that has fewer threads than clients runs each task in a new process: the job does not start again."""
    for number, task in ((0, "train"), (1, "train"), (1, "submit_model")):
        client = JobRecord(job="simulate_job", site="site-1", role="client")
        write(
            path,
            client,
            TaskRecord(task=task, round=number),
            TransferRecord(direction="sent", round=number, peer="server"),
        )
        write(path, EndRecord(status="finished"))
    found = read_records(path)
    assert len(found.starts) == 1
    assert [(task.task, task.round) for task in found.tasks] == [("train", 0), ("train", 1), ("submit_model", 1)]
    assert [transfer.round for transfer in found.transfers] == [0, 1, 1]
    # A run that was killed or aborted, or the job of another name, starts again.
    write(path, client, EndRecord(status="aborted"), client)
    write(path, EndRecord(status="finished"), JobRecord(job="other", site="site-1", role="client"))
    assert len(read_records(path).starts) == 3


def test_a_copy_continues_in_another_run_directory(path, tmp_path):
    """With a copy in the directory of the checkpoints, a job that is submitted again has the records of both runs."""
    copy = tmp_path / "checkpoints.jsonl"
    write(path, JobRecord(job="first")).keep_copy(copy, continues=False)
    writer = write(path, RoundRecord(round=0))
    writer.keep_copy(copy, continues=False)
    with open(copy, "ab") as file:
        file.write(b'{"kind": "rou')
    later = write(tmp_path / "second.jsonl", JobRecord(job="second"))
    later.keep_copy(copy, continues=True)
    later.keep_copy(copy, continues=True)  # by a second workflow of the job
    later.write(RoundRecord(round=1))
    for found in (tmp_path / "second.jsonl", copy):
        records = read_records(found)
        assert [start.job for start in records.starts] == ["first", "second"]
        assert [each.round for each in records.rounds] == [0, 1]


def test_a_file_stays_small(path):
    """Many rounds with many clients: the size is bounded, the totals of old rounds and all of the last one stay."""
    limit = 60_000
    writer = write(path, JobRecord(job="a"), max_bytes=limit)
    sizes = []
    for number in range(120):
        clients = {f"site-{client}": ContributionRecord(client=f"site-{client}", seconds=1.0) for client in range(20)}
        for contribution in clients.values():
            writer.write(contribution)
        writer.write(SampleRecord(memory_bytes=1000 if number == 77 else number))
        writer.write(RoundRecord(round=number, clients=clients, counts={"tasked": 20}))
        sizes.append(path.stat().st_size)
    records = read_records(path)
    assert max(sizes) <= limit
    assert records.job is not None
    assert records.damaged == 0
    assert len(records.rounds) > 50
    assert len(records.rounds[-1].clients) == 20
    assert all(each.counts == {"tasked": 20} for each in records.rounds)
    assert max(sample.memory_bytes for sample in records.samples) == 1000


def test_hostile_names_and_reasons_are_cut_and_escaped(path):
    """Also if the file itself is hostile: nothing in a record controls a terminal, and nothing in it is long."""
    skipped = {HOSTILE + str(number): "x" * 5000 for number in range(1000)}
    round_ = RoundRecord(round=0, skipped=skipped, tasked=["y" * 5000] * 1000, counts={"skipped": 1000})
    write(path, round_, ContributionRecord(client=HOSTILE, reason=HOSTILE * 500))
    longest = max(map(len, path.read_bytes().splitlines()))
    path.write_text(path.read_text() + json.dumps({"kind": "contribution", "client": HOSTILE * 999}) + "\n")
    records = read_records(path)
    assert longest < MAX_ENTRIES * 1500
    texts = [*records.rounds[0].skipped, *(each.client for each in records.contributions)]
    assert all(text.isprintable() and len(text) <= 500 for text in texts)
    assert len(records.rounds[0].skipped) == len(records.rounds[0].tasked) == MAX_ENTRIES
    assert records.rounds[0].counts == {"skipped": 1000}


def test_metrics_do_not_make_a_round_unreadable(path):
    """Clients choose the names of metrics: a round in which they are too long has its counts, and no clients."""
    metrics = {f"{number:03}" + "\u00e9" * 200: 1.0 for number in range(MAX_ENTRIES)}
    clients = {f"site-{number}": ContributionRecord(client=f"site-{number}", metrics=metrics) for number in range(20)}
    write(path, RoundRecord(round=0, clients=clients, counts={"aggregated": 20}), RoundRecord(round=1))
    records = read_records(path)
    assert path.stat().st_size < 1 << 20
    assert (records.damaged, [each.round for each in records.rounds]) == (0, [0, 1])
    assert (records.rounds[0].counts, records.rounds[0].clients) == ({"aggregated": 20}, {})


def _append(path, first, count):
    writer = RecordWriter(path, print, max_bytes=20_000)
    for number in range(first, first + count):
        writer.write(TransferRecord(direction="sent", peer="x" * 50, round=number))


def test_several_processes_write_to_one_file(path):
    """A client job and its trainers, also while the file is thinned: no line is damaged."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_append, args=(path, 1000 * part, 300)) for part in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    records = read_records(path)
    assert records.damaged == 0
    assert path.stat().st_size <= 20_000
    assert {1000 * part + 299 for part in range(3)} & {each.round for each in records.transfers}


def test_a_full_disk_costs_records_and_no_job(small_disk):
    """The error is reported once, a line is written in one piece or not at all, and later lines are tried again."""
    path, filler, errors = small_disk / "records", small_disk / "filler", []
    writer = RecordWriter(path, errors.append)
    writer.write(RoundRecord(round=0))
    with pytest.raises(OSError, match="No space"), open(filler, "wb", buffering=0) as file:  # noqa: PT012
        while True:
            file.write(b"x" * 4096)
    for number in range(1, 100):
        writer.write(RoundRecord(round=number, tasked=["a"] * 100))
    assert len(errors) == 1
    assert "will be incomplete" in errors[0]
    filler.unlink()
    writer.write(RoundRecord(round=100))
    records = read_records(path)
    assert records.damaged == 0
    assert (records.rounds[0].round, records.rounds[-1].round) == (0, 100)


def test_a_record_costs_little_time(path):
    """Less than a millisecond of processor time, with a generous limit for slow machines."""
    writer = write(path)
    started = time.process_time()
    for _ in range(200):
        writer.write(SampleRecord(memory_bytes=1))
    each = (time.process_time() - started) / 200
    print(f"{each * 1e6:.0f} microseconds per record in process {os.getpid()}")
    assert each < 0.005
