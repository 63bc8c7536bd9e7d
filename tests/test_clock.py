# SPDX-License-Identifier: Apache-2.0
"""A clock that is set, by an operator or by a time server, changes no lease, no download and no duration."""

from __future__ import annotations

import ast
import errno
import fcntl
import os
import time
from pathlib import Path

import pytest

from nvflare_lazy.flare.round_log import RoundLog
from nvflare_lazy.scratch import JobScratch, _lease, list_scratch, reclaim
from nvflare_lazy.transport._receiver_progress import ReceiverProgress
from nvflare_lazy.transport.receive import ProgressRelay

PACKAGE = Path(__file__).parents[1] / "nvflare_lazy"
DAYS = 30 * 86400
#: The functions that read the clock: for records and lists, or where a wrong time does no harm.
READS_THE_CLOCK = {
    "formats/_remote_commit.py: __init__": "the number in the names of the shards of a save",
    "records/schema.py: now": "the time of a record",
    "remote/_retries.py: _seconds": "the date in a Retry-After header",
    "report/job_report.py: summarize": "how long a running job has run, in a report",
    "scratch/_lease.py: for_this_process": "for the age in lists of leases",
    "scratch/_reclaim.py: _inspect_lease": "for the age in lists of leases",
    "scratch/_reclaim.py: _remove_unfinished_leases": "a process whose unfinished lease is removed makes another one",
    "transport/_receiver_progress.py: __init__": "the time of the last request, for NVFlare",
    "transport/_receiver_progress.py: _counts": "the time of the last request, for NVFlare",
    "transport/receive.py: received": "the time of an event, for NVFlare",
}


@pytest.fixture(params=[DAYS, -DAYS], ids=["forward", "backward"])
def jump(request, monkeypatch):
    """A function that sets the clock."""
    real, offset = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + offset[0])
    return lambda: offset.__setitem__(0, request.param)


def test_functions_that_read_the_clock():
    """Every other function measures time by the monotonic clock."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            names = {ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Attribute)}
            if names & {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now"}:
                found.add(f"{path.relative_to(PACKAGE)}: {function.name}")
    assert found == set(READS_THE_CLOCK)


@pytest.mark.parametrize("locks", [True, False])
def test_leases(tmp_path, jump, monkeypatch, locks):
    """A running owner keeps its directory, with and without locks; its age is never negative."""
    if not locks:
        monkeypatch.setattr(fcntl, "flock", _refuse)
    root = tmp_path / "scratch"
    with JobScratch.open(root, job="job", min_free=0) as job:
        file = job.download().new_file()
        jump()
        JobScratch.open(root, job="other", min_free=0).release()
        assert reclaim(root, include_other_hosts=True) == []
        (lease,) = list_scratch(root)
        assert lease.alive
        assert lease.age >= 0
        file.pwrite(b"abc", 0)
        assert file.finish().size == 3


def test_lease_in_the_making(tmp_path, jump, monkeypatch):
    """Without locks a process whose clock differs takes it for an abandoned one; its owner makes another."""
    monkeypatch.setattr(fcntl, "flock", _refuse)
    root = tmp_path / "scratch"
    pwrite, interrupted = os.pwrite, []

    def interrupt(fd, data, offset):
        if not interrupted:
            interrupted.append(os.listdir(root))
            os.utime(fd, (time.time() - DAYS - 7200,) * 2)
            reclaim(root)
        return pwrite(fd, data, offset)

    monkeypatch.setattr(_lease.os, "pwrite", interrupt)
    jump()
    with JobScratch.open(root, job="job", min_free=0) as job:
        assert interrupted
        assert job.path.exists()
        assert [lease.alive for lease in list_scratch(root)] == [True]


def test_progress_of_a_download(jump, monkeypatch):
    """It is reported once a second before and after; without it, NVFlare's transaction would expire."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    events = []
    relay = ProgressRelay(lambda **event: events.append(event["bytes_done"]))
    for nbytes in (1, 2, 3):
        relay.received(nbytes)
        relay.received(nbytes + 100)
        now[0] += 100.0
        jump()
    assert events == [1, 2, 3]


def test_receiver_of_a_payload(jump):
    """A receiver that is fast enough counts as such before and after."""
    progress = ReceiverProgress()
    assert progress.sent("site-1", 0, 100, patience=600.0)
    jump()
    assert progress.sent("site-1", 100, 200, patience=600.0)


def test_durations_of_a_round(tmp_path, jump):
    """Records of rounds have the seconds that have passed."""
    log = RoundLog(tmp_path / "records", lambda line: None, lambda record: None)
    log.start_round(0)
    log.on_task_sent("site-1")
    jump()
    log.on_result("site-1", 100, 1, on_disk=True)
    record = log.end_round(scratch_bytes=0, scratch_peak_bytes=0)
    assert record is not None
    assert 0 <= record.seconds < 60


def _refuse(fd, operation):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
