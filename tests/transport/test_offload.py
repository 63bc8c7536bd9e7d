# SPDX-License-Identifier: Apache-2.0
"""The object that a process's transfers share: its mode, and what a forked child gets of it."""

from __future__ import annotations

import os
import threading

import pytest

from nvflare_lazy.scratch import JobScratch, current_job_scratch, reset_job_scratch, swap_job_scratch
from nvflare_lazy.transport import offload
from nvflare_lazy.transport.offload import ReceiveMode, TransferRuntime


def test_modes_nest():
    """`use()` returns the mode before, with its limit; None is NVFlare's flag and the default limit."""
    runtime = TransferRuntime()
    default = runtime.budget.limit
    outer, inner = ReceiveMode(True, 5 << 20), ReceiveMode(False, 7 << 20)
    assert runtime.use(outer) is None
    assert runtime.use(inner) is outer
    assert runtime.budget.limit == 7 << 20
    assert runtime.use(outer) is inner
    assert runtime.budget.limit == 5 << 20
    assert runtime.use(None) is outer
    assert runtime.budget.limit == default
    assert runtime.scratch_for(None) is None


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


def test_forked_child(tmp_path, monkeypatch):
    """A child receives as its parent does, into its own scratch, and inherits no transfers and no locks."""
    monkeypatch.setenv("NVFLARE_LAZY_SCRATCH", str(tmp_path))
    runtime = offload.runtime
    job_before = swap_job_scratch(JobScratch.open(tmp_path, job="parent", warn=False))
    before = runtime.use(ReceiveMode(True, 4 << 20))
    taken = runtime.budget.acquire(4 << 20, holding=0)
    slot = runtime.throttle.acquire(4 << 20)
    runtime.senders_with_package.add("site-1")
    runtime.on_buffers_released.append(lambda: os._exit(7))
    try:
        parent_scratch = runtime.scratch_for(None)
        with runtime.budget._changed, runtime.throttle._changed:  # as if other threads were in the middle of it
            pid = os.fork()
            if pid == 0:
                threading.Timer(20, os._exit, (8,)).start()
                ok = (
                    runtime.scratch_for(None) is not parent_scratch
                    and (runtime.budget.limit, runtime.budget.used) == (4 << 20, 0)
                    and runtime.budget.acquire(4 << 20, holding=0)
                    and runtime.throttle.acquire_if_free(4 << 20) is not None
                    and not runtime.senders_with_package
                    and not runtime.downloads.active()
                )
                reset_job_scratch()
                os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert taken
        assert (runtime.budget.used, runtime.throttle.used) == (4 << 20, 4 << 20)
        assert current_job_scratch() is parent_scratch
    finally:
        runtime.on_buffers_released.clear()
        runtime.senders_with_package.clear()
        runtime.budget.release(4 << 20)
        runtime.throttle.release(slot)
        runtime.use(before)
        reset_job_scratch()
        swap_job_scratch(job_before)


@pytest.mark.parametrize("known", [False, True])
def test_first_answers_of_known_senders_are_not_throttled(known):
    """Downloads from a cell that has offered segments do not queue behind whole tensors of slow stock senders."""
    from types import SimpleNamespace

    from nvflare_lazy.transport._backends import TORCH
    from nvflare_lazy.transport._memory_consumer import MemoryConsumer
    from nvflare_lazy.transport.segments.client import RemotePayload

    runtime = TransferRuntime()
    if known:
        runtime.senders_with_package.add("site-1")
    consumer = MemoryConsumer(TORCH)
    consumer.attach(RemotePayload(runtime, SimpleNamespace(), "site-1", "ref"))
    consumer.acquire_slot()
    assert bool(runtime.throttle.used) is not known
    consumer.release_slot()
    assert runtime.throttle.used == 0
