# SPDX-License-Identifier: Apache-2.0
"""The job scratch that a decomposer finds without being given one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from nvflare_lazy.scratch import JobScratch, current_job_scratch, reset_job_scratch, swap_job_scratch
from tests.scratch.conftest import names


@pytest.fixture(autouse=True)
def _own_default(root, monkeypatch):
    monkeypatch.setenv("NVFLARE_LAZY_SCRATCH", str(root))
    reset_job_scratch()
    yield
    reset_job_scratch()


def test_opened_once_when_first_needed(root):
    """However many threads ask first, one directory is made, where the environment says."""
    assert not root.exists()
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: current_job_scratch(), range(64)))
    assert len(found) == 1
    assert found.pop().root == root
    assert len(names(root)) == 2


def test_configured_one_is_used(root):
    """Whoever configures the job says which; the one before is handed back, untouched."""
    with JobScratch.open(root, job="configured", quota=5, min_free=0) as job:
        assert swap_job_scratch(job) is None
        assert current_job_scratch() is job
        assert swap_job_scratch(None) is job
        assert not job.released
        assert current_job_scratch() is not job


def test_released_one_is_replaced(root):
    """A job that ended does not keep the process from receiving."""
    first = current_job_scratch()
    first.release()
    assert current_job_scratch() is not first
    assert not current_job_scratch().released


def test_reset_releases(root):
    """After a reset nothing is left, and the next use starts over."""
    current_job_scratch().download()
    reset_job_scratch()
    assert names(root) == []


FORKING = """
import os, signal, sys, threading
from nvflare_lazy.scratch import JobScratch, current_job_scratch, reset_job_scratch

really_open, opening, forked = JobScratch.open, threading.Event(), threading.Event()

def open_slowly(*arguments, **options):
    opening.set()
    forked.wait()
    return really_open(*arguments, **options)

JobScratch.open = open_slowly
found = []
thread = threading.Thread(target=lambda: found.append(current_job_scratch()))
thread.start()
opening.wait()
if os.fork() == 0:
    signal.alarm(60)
    JobScratch.open = really_open
    job = current_job_scratch()
    print(job is current_job_scratch(), job.job == f"process {os.getpid()}", flush=True)
    reset_job_scratch()
    os._exit(0)
os.wait()
forked.set()
thread.join()
print(found[0] is current_job_scratch(), found[0].released, flush=True)
"""


def test_forked_child_starts_over(start_child, root):
    """A child opens its own, also if another thread of its parent was about to open one, and held the lock."""
    child = start_child(FORKING)
    assert child.says() == "True True"
    assert child.says() == "True False"
    assert child.ends() == 0
    assert names(root) == []
