# SPDX-License-Identifier: Apache-2.0
"""The threads that send: as many as are needed, none that a process would have to wait for, none when all is sent."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from nvflare_lazy.transport.segments import server as sending_threads
from nvflare_lazy.transport.segments.server import SenderPool


@pytest.fixture(autouse=True)
def short_linger(monkeypatch):
    monkeypatch.setattr(sending_threads, "_LINGER_SECONDS", 0.2)


def running():
    return [thread for thread in threading.enumerate() if thread.name.startswith("sends")]


def test_all_calls_run_on_few_threads():
    """Every call is made, by no more threads than allowed, at the same time; then the threads end."""
    threads = SenderPool(3, "sends")
    together, lock, seen, done = threading.Barrier(3), threading.Lock(), set(), []

    def call(number):
        if number < 3:
            together.wait(60)  # only three at the same time get past this
        with lock:
            seen.add(threading.current_thread().name)
            done.append(number)

    for number in range(100):
        threads.call(call, number)
    deadline = time.monotonic() + 60
    while len(done) < 100 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(done) == list(range(100))
    assert len(seen) <= 3
    assert all(thread.daemon for thread in running())
    while running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running() == []
    threads.call(done.append, 100)
    while len(done) < 101 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert done[-1] == 100


def test_calls_one_after_the_other_share_a_thread(monkeypatch):
    """A thread that is free is used again."""
    monkeypatch.setattr(sending_threads, "_LINGER_SECONDS", 60)
    threads = SenderPool(32, "shares")
    names = []
    for number in range(20):
        threads.call(lambda: names.append(threading.current_thread().name))
        deadline = time.monotonic() + 60
        while not (len(names) > number and threads._idle) and time.monotonic() < deadline:
            time.sleep(0.001)
    assert len(names) == 20
    assert len(set(names)) == 1


def test_a_process_ends_without_waiting():
    """A process whose sender is stuck ends at once all the same, and quietly."""
    program = (
        "import threading; from nvflare_lazy.transport.segments.server import SenderPool; "
        "SenderPool(1, 'sends').call(threading.Event().wait, 1000)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=500)
    assert (ended.returncode, ended.stderr) == (0, b"")
