# SPDX-License-Identifier: Apache-2.0
"""The warning at the start of a job whose machine or container is too small for its model."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ProcessType, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.workflows.fedavg import FedAvg

from nvflare_lazy.flare import LazyAggregator, TensorOffload, job_demand
from nvflare_lazy.formats import save
from nvflare_lazy.scratch import container
from nvflare_lazy.scratch.container import MemoryLimit
from tests.flare.test_acceptance_rules import one_component

MIB = 1 << 20
MODEL = {"w": torch.zeros(MIB)}


@pytest.fixture
def demand(monkeypatch, engine):
    """The demand that the job compares with the limits; three clients take part."""
    seen = []
    engine.get_clients = lambda: ["site-1", "site-2", "site-3"]

    def find_shortages(memory, storage):
        seen.append((memory, storage))
        return ["the memory limit is too low"]

    monkeypatch.setattr(job_demand, "find_shortages", find_shortages)
    return seen


def run_server(fl_ctx, tmp_path: Path, controller) -> TensorOffload:
    fl_ctx.set_prop(FLContextKey.PROCESS_TYPE, ProcessType.SERVER_JOB, private=True, sticky=True)
    one_component(fl_ctx, controller, **MODEL)
    offload = TensorOffload(scratch_dir=str(tmp_path / "root"), min_free=0)
    offload.handle_event(EventType.START_RUN, fl_ctx)
    return offload


def send_task(offload: TensorOffload, fl_ctx, number: int = 0) -> None:
    peer = FLContext()
    peer.set_prop(ReservedKey.IDENTITY_NAME, "site-1", private=False)
    fl_ctx.set_peer_context(peer)
    task = DXO(DataKind.WEIGHTS, MODEL).to_shareable()
    task.set_header(AppConstants.CURRENT_ROUND, number)
    fl_ctx.set_prop(FLContextKey.TASK_DATA, task, private=True, sticky=False)
    fl_ctx.set_prop(FLContextKey.TASK_NAME, "train", private=True, sticky=False)
    offload.handle_event(EventType.AFTER_TASK_DATA_FILTER, fl_ctx)


def test_level_2(start, fl_ctx, tmp_path, demand, caplog):
    """Results of all clients, and checkpoints: two kept rounds, the best and a new one. It is logged once."""
    path = save(MODEL, tmp_path / "m.safetensors")
    start(source_ckpt_file_full_name=str(path), checkpoint_dir=str(tmp_path / "checkpoints"))
    offload = run_server(fl_ctx, tmp_path, FedAvg(num_clients=2, aggregator=LazyAggregator()))
    for number in range(2):
        send_task(offload, fl_ctx, number)
    [(memory, storage)] = demand
    assert memory == 128 * MIB
    scratch, checkpoints = storage
    assert (scratch, storage[scratch]) == (offload._scratch.path, 12 * MIB)
    assert checkpoints == tmp_path / "checkpoints"
    assert 15.9 * MIB < storage[checkpoints] <= 16 * MIB
    assert caplog.text.count("This machine may be too small for 3 results of 4.0 MiB: the memory limit is too low") == 1
    offload.handle_event(EventType.END_RUN, fl_ctx)


def test_level_1(fl_ctx, tmp_path, demand):
    """NVFlare's mean takes two models of memory, and its persistor writes two files to the app's folder."""
    offload = run_server(fl_ctx, tmp_path, FedAvg(num_clients=2))
    send_task(offload, fl_ctx)
    [(memory, storage)] = demand
    assert memory == 136 * MIB
    assert storage[Path(fl_ctx.get_prop(FLContextKey.APP_ROOT))] == 8 * MIB
    offload.handle_event(EventType.END_RUN, fl_ctx)


def test_a_client(fl_ctx, engine, monkeypatch, tmp_path, caplog):
    """It compares the memory limit at its start."""
    monkeypatch.setattr(container, "memory_limit", lambda: MemoryLimit(100 * MIB, 50 * MIB, Path("/memory.max")))
    fl_ctx.set_prop(FLContextKey.PROCESS_TYPE, ProcessType.CLIENT_JOB, private=True, sticky=True)
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, "site-1")
    offload = TensorOffload(scratch_dir=str(tmp_path / "root"), min_free=0)
    offload.handle_event(EventType.START_RUN, fl_ctx)
    assert "50.0 MiB are in use, page cache not included, and 128.0 MiB more are needed" in caplog.text
    offload.handle_event(EventType.END_RUN, fl_ctx)


def test_a_disk_below_the_results_of_all_clients(fl_ctx, engine, tmp_path, monkeypatch, caplog):
    """The warning has the number and the size of the results, the directories, and the free and missing space."""
    engine.get_clients = lambda: ["site-1", "site-2", "site-3"]
    actual = os.statvfs

    def small(path):
        status = actual(path)
        return SimpleNamespace(f_bavail=10 * MIB // status.f_frsize, f_frsize=status.f_frsize, f_blocks=status.f_blocks)

    offload = run_server(fl_ctx, tmp_path, FedAvg(num_clients=2, aggregator=LazyAggregator()))
    monkeypatch.setattr(os, "statvfs", small)
    send_task(offload, fl_ctx)
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    app = fl_ctx.get_prop(FLContextKey.APP_ROOT)
    assert (
        f"This machine may be too small for 3 results of 4.0 MiB: the disk of {offload._scratch.path} and {app} has "
        "10.0 MiB free, and the job needs 20.0 MiB, 10.0 MiB too much; free space, or use another disk"
    ) in warning
    offload.handle_event(EventType.END_RUN, fl_ctx)
