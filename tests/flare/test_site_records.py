# SPDX-License-Identifier: Apache-2.0
"""Other records of a job's process, on the server, on a client and in a client's trainer."""

from __future__ import annotations

import threading

import pytest
from nvflare.apis.fl_constant import FLContextKey, ProcessType, ReservedKey
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants

from nvflare_lazy.flare.round_log import RoundLog
from nvflare_lazy.flare.site_records import SiteRecords
from nvflare_lazy.records import FILE_NAME, TransferRecord, read_records
from nvflare_lazy.records.sampler import Sampler
from nvflare_lazy.records.trainer import set_trainer_records
from nvflare_lazy.transport import offload

SERVER = "server.job"


@pytest.fixture
def begin(tmp_path, fl_ctx, scratch):
    """Starts the records of a process, and returns them; the context has a signal of the run."""
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, "site-1")
    fl_ctx.set_prop(ReservedKey.RUN_ABORT_SIGNAL, Signal(), private=True, sticky=True)

    def begin(process_type):
        fl_ctx.set_prop(FLContextKey.PROCESS_TYPE, process_type, private=True, sticky=True)
        log = RoundLog(tmp_path / FILE_NAME, pytest.fail)
        return SiteRecords(log, scratch, {"scratch_quota": "1GiB", "min_free": None}, fl_ctx)

    return begin


def transfer(direction, peer, **more):
    offload.runtime.record_transfer(TransferRecord(direction=direction, peer=peer, nbytes=5, way="in segments", **more))


def begin_task(records, fl_ctx, number):
    task = Shareable()
    task.set_header(AppConstants.CURRENT_ROUND, number)
    fl_ctx.set_prop(FLContextKey.TASK_DATA, task)
    fl_ctx.set_prop(FLContextKey.TASK_NAME, "train")
    records.on_task(fl_ctx)


def test_a_client(tmp_path, begin, fl_ctx):
    """The tensors of a task have its round, although they are received before it is known; so has the result."""
    records = begin(ProcessType.CLIENT_JOB)
    for number in (3, 4):
        transfer("received", SERVER)
        begin_task(records, fl_ctx, number)
        transfer("sent", SERVER)
    transfer("received", "site-1.job.trainer")
    transfer("received", "site-2.job")  # swarm learning: of any round
    transfer("received", SERVER)  # of a task that never begins
    offload.runtime.record_transfer(TransferRecord(direction="sent", peer=SERVER, nbytes=0))
    records.end(fl_ctx)
    found = read_records(tmp_path / FILE_NAME)
    assert found.job is not None
    assert (found.job.role, found.job.settings["scratch_quota"]) == ("client", "1GiB")
    assert {"nvflare-lazy", "nvflare", "torch", "python"} <= found.job.versions.keys()
    assert [(each.direction, each.round) for each in found.transfers] == [
        *(("received", 3), ("sent", 3), ("received", 4), ("sent", 4)),
        *(("received", 4), ("received", None), ("received", None)),
    ]
    assert [task.round for task in found.tasks] == [3, 4]
    assert found.end is not None
    assert found.end.status == "finished"
    assert not offload.runtime.on_transfer


def test_a_trainer(tmp_path, begin, fl_ctx):
    """The trainer writes to the file of its client job, and the reader finds the round by the time."""
    records = begin(ProcessType.CLIENT_JOB)
    listener = offload.runtime.on_transfer.pop()
    before = set_trainer_records(str(tmp_path / FILE_NAME))
    try:
        transfer("received", SERVER)  # before the first task
        for number in (0, 1):
            begin_task(records, fl_ctx, number)
            transfer("received", SERVER)
    finally:
        set_trainer_records(before)
    transfer("received", SERVER)  # no file
    offload.runtime.on_transfer.append(listener)
    records.end(fl_ctx)
    found = read_records(tmp_path / FILE_NAME)
    assert len(found.transfers) == 3
    assert {each.process for each in found.transfers} == {"trainer"}
    assert found.transfers[-1].round == 1
    assert sum(sample.process == "trainer" for sample in found.samples) == 3


@pytest.mark.parametrize("status", ["finished", "aborted", "failed"])
def test_the_end_of_a_server(tmp_path, begin, fl_ctx, status):
    """Whether the job was aborted, or a component has ended it, with the reason."""
    records = begin(ProcessType.SERVER_JOB)
    if status == "failed":
        fl_ctx.set_prop(FLContextKey.EVENT_DATA, "no usable results")
        records.on_failure(fl_ctx)
    if status != "finished":
        fl_ctx.get_run_abort_signal().trigger(True)
    transfer("received", "site-1.job")
    records.end(fl_ctx)
    found = read_records(tmp_path / FILE_NAME)
    assert found.end is not None
    assert (found.end.status, found.end.reason) == (status, "no usable results" if status == "failed" else None)
    assert found.transfers == []  # they are in the records of the rounds


def test_samples(monkeypatch):
    """The most since the last record with its time, less often the longer a job runs; the peak since the last call."""
    now, memory, written = [0.0], [100], []
    monkeypatch.setattr("nvflare_lazy.records.sampler.time.monotonic", lambda: now[0])
    monkeypatch.setattr("nvflare_lazy.records.sampler.anonymous_bytes", lambda: memory[0])
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(threading.Thread, "join", lambda self: None)
    sampler = Sampler(written.append, lambda: memory[0] * 2)
    for tick in range(7 * 24 * 360):
        now[0] += 10.0
        memory[0] = 10_000 if tick == 9_999 else 50 + tick % 7
        sampler.look()
    assert sampler.take_peak() == 10_000
    memory[0] = 60
    assert sampler.take_peak() == 60
    sampler.stop()
    print(f"{len(written)} samples of a week")
    assert 2000 < len(written) < 4000
    assert max(sample.memory_bytes for sample in written) == 10_000
    assert max(sample.scratch_bytes for sample in written) == 20_000
