# SPDX-License-Identifier: Apache-2.0
"""The object that a process's transfers share: its mode, its default scratch, and its state in a forked child."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from nvflare.app_opt.pt import tensor_downloader
from nvflare.fuel.utils.fobs import FOBSContextKey

from nvflare_lazy.scratch import JobScratch
from nvflare_lazy.transport import offload
from nvflare_lazy.transport.limits import PayloadLimits
from nvflare_lazy.transport.offload import ReceiveMode, TransferRuntime
from nvflare_lazy.transport.tensor_downloader import DiskTensorConsumer


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Where the environment says that scratch is."""
    monkeypatch.setenv("NVFLARE_LAZY_SCRATCH", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def test_default_scratch_is_opened_once_when_first_needed(root):
    """However many threads ask first, one directory is made; it is gone after a release, and the next use starts over.

    So a job that ended does not keep the process from receiving.
    """
    scratch = TransferRuntime().scratch
    assert not root.exists()
    with ThreadPoolExecutor(8) as pool:
        (job,) = set(pool.map(lambda _: scratch.job(), range(64)))
    assert job.root == root
    assert scratch.download("x").path.parent == job.path
    job.release()
    assert scratch.job() is not job
    scratch.release()
    assert [path for path in root.iterdir() if not path.name.startswith(".")] == []
    scratch.release()


def test_configured_scratch(root):
    """A configured scratch is also where a job's own files go; the end of the process releases it."""
    runtime = TransferRuntime()
    with JobScratch.open(root, job="configured", quota=5, min_free=0) as job:
        runtime.use(ReceiveMode(job, 1 << 20))
        assert runtime.scratch is job
        assert runtime.mode_for(None).scratch is job
        runtime.use(ReceiveMode(None, 1 << 20))
        assert runtime.scratch is runtime.default_scratch
        runtime.use(ReceiveMode(job, 1 << 20))
        runtime.release_scratch()
        assert job.released


def test_modes_nest():
    """`use()` returns the mode before, with its limit; None is NVFlare's flag and the default limit."""
    runtime = TransferRuntime()
    default = runtime.budget.limit
    outer, inner = ReceiveMode(runtime.default_scratch, 5 << 20), ReceiveMode(None, 7 << 20)
    assert runtime.use(outer) is None
    assert runtime.use(inner) is outer
    assert runtime.budget.limit == 7 << 20
    assert runtime.use(outer) is inner
    assert runtime.budget.limit == 5 << 20
    assert runtime.use(None) is outer
    assert runtime.budget.limit == default
    assert runtime.mode_for(None).scratch is None


def test_explicit_request_for_memory(root):
    """NVFlare's explicit request for ordinary values is honored, except where an earlier workflow only left the flag.

    The limits on the payload stay.
    """
    runtime = TransferRuntime()
    request = {FOBSContextKey.TENSOR_DISK_OFFLOAD: False}
    limits = PayloadLimits(nbytes=7)
    for mode in (None, ReceiveMode(runtime.default_scratch, 5 << 20, limits), ReceiveMode(None, 5 << 20)):
        runtime.use(mode)
        found = runtime.mode_for(request)
        assert found.scratch is None
        assert mode is None or found == mode._replace(scratch=None)
        in_message = runtime.mode_for({**request, FOBSContextKey.MESSAGE: object()})
        assert in_message.scratch is (None if mode is None else mode.scratch)
    assert not root.exists()


def test_switches_keep_the_limit():
    """`enable()` and `disable()` change it only if they are told to."""
    before = offload.runtime.use(None)
    try:
        offload.enable(inflight_bytes=3 << 20)
        offload.disable()
        assert offload.runtime.budget.limit == 3 << 20
        offload.enable()
        assert offload.runtime.budget.limit == 3 << 20
    finally:
        offload.runtime.use(before)


def test_forked_child(root, tmp_path):
    """A child receives as its parent does, into its own scratch, and inherits no transfers and no locks."""
    runtime = offload.runtime
    parent_scratch = JobScratch.open(root, job="parent", warn=False)
    before = runtime.use(ReceiveMode(parent_scratch, 4 << 20))
    taken = runtime.budget.acquire(4 << 20, holding=0)
    slot = runtime.throttle.acquire(4 << 20)
    runtime.senders_with_package.add("site-1")
    runtime.on_buffers_released.append(lambda: os._exit(7))
    download = DiskTensorConsumer(tmp_path)
    try:
        # As if other threads were in the middle of it.
        with runtime.budget._changed, runtime.throttle._changed, runtime.default_scratch._lock:
            pid = os.fork()
            if pid == 0:
                threading.Timer(20, os._exit, (8,)).start()
                ok = (
                    runtime.mode_for(None).scratch is runtime.scratch is runtime.default_scratch
                    and runtime.scratch.job().job == f"process {os.getpid()}"
                    and (runtime.budget.limit, runtime.budget.used) == (4 << 20, 0)
                    and runtime.budget.acquire(4 << 20, holding=0)
                    and runtime.throttle.acquire_if_free(4 << 20) is not None
                    and not runtime.senders_with_package
                    and not tensor_downloader._ACTIVE_DISK_TENSOR_CONSUMERS
                )
                runtime.release_scratch()
                os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert taken
        assert (runtime.budget.used, runtime.throttle.used) == (4 << 20, 4 << 20)
        assert runtime.scratch is parent_scratch
        assert not parent_scratch.released
    finally:
        runtime.on_buffers_released.clear()
        runtime.senders_with_package.clear()
        runtime.budget.release(4 << 20)
        runtime.throttle.release(slot)
        runtime.use(before)
        parent_scratch.release()
        download.release()


@pytest.mark.parametrize("known", [False, True])
def test_first_answers_of_known_senders_are_not_throttled(known):
    """Downloads from a cell that has offered segments do not queue behind whole tensors of slow stock senders."""
    from types import SimpleNamespace

    from nvflare_lazy.transport._backends import TORCH
    from nvflare_lazy.transport._memory_consumer import MemoryConsumer
    from nvflare_lazy.transport.receive import RemotePayload

    runtime = TransferRuntime()
    if known:
        runtime.senders_with_package.add("site-1")
    consumer = MemoryConsumer(TORCH)
    consumer.attach(RemotePayload(runtime, SimpleNamespace(), "site-1", "ref"))
    consumer.acquire_slot()
    assert bool(runtime.throttle.used) is not known
    consumer.release_slot()
    assert runtime.throttle.used == 0
