# SPDX-License-Identifier: Apache-2.0
"""The queue of requests for segments is fair and bounded; its threads do not keep a process alive."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from unittest.mock import MagicMock

import pytest
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message

from nvflare_lazy.transport.segments import protocol
from nvflare_lazy.transport.segments import server as server_module
from nvflare_lazy.transport.segments.server import SegmentServer, SenderPool


@pytest.fixture
def served(monkeypatch):
    """A server that notes what it answers, as soon as it may, and the function that sends it a request."""
    gate, answered, core = threading.Event(), [], MagicMock()
    core.communicator.conn_manager.get_connections.return_value = []

    def answer(self, job):
        if job.requester != "free":
            gate.wait(60)
        answered.append((job.requester, job.request.start))

    monkeypatch.setattr(SegmentServer, "_answer", answer)
    monkeypatch.setattr(server_module, "_MAX_THREADS", 2)
    server = SegmentServer()

    def ask(requester, start):
        request = protocol.Request("number", "ref", protocol.DATA, start, 8)
        message = Message(request.to_headers(), None)
        message.set_header(MessageHeaderKey.ORIGIN, requester)
        server._take(message, core)

    return ask, gate, answered


def wait_for(answered, count):
    deadline = time.monotonic() + 60
    while len(answered) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    return len(answered)


def test_asked_twice(served):
    """A queued segment is not queued again; a receiver's requests are answered in order."""
    ask, gate, answered = served
    for start in (0, 8, 16, 8, 16, 24):
        ask("site-1", start)
    gate.set()
    assert wait_for(answered, 4) == 4
    assert answered == [("site-1", start) for start in (0, 8, 16, 24)]


def test_without_end(served, monkeypatch):
    """A receiver that keeps requesting has a queue of limited length, and delays no other receiver."""
    monkeypatch.setattr(server_module, "_MAX_WAITING", 20)
    ask, gate, answered = served
    for start in range(10_000):
        ask("site-1", start)
    ask("free", 5)
    assert wait_for(answered, 1) == 1
    assert answered == [("free", 5)]
    gate.set()
    assert wait_for(answered, 22) == 22


def test_more_receivers_than_threads(served):
    """They take turns: each receiver has the first answer before any has the third."""
    ask, gate, answered = served
    for requester in ("first", "second"):
        ask(requester, 0)  # these hold both threads until all receivers are queued
    for requester in "abcdefgh":
        for start in range(3):
            ask(requester, start)
    gate.set()
    assert wait_for(answered, 26) == 26
    first = max(answered.index((requester, 0)) for requester in "abcdefgh")
    third = min(answered.index((requester, 2)) for requester in "abcdefgh")
    assert first < third


def test_rubbish(served, caplog):
    """Invalid requests are ignored, and a line is logged for each."""
    ask, gate, answered = served
    gate.set()
    ask("site-1", -1)
    ask("site-1", 1 << 63)
    ask("site-1", 8)
    assert wait_for(answered, 1) == 1
    assert len([record for record in caplog.records if "Ignored" in record.message]) == 2


@pytest.fixture(autouse=True)
def short_linger(monkeypatch):
    monkeypatch.setattr(server_module, "_LINGER_SECONDS", 0.2)


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
    monkeypatch.setattr(server_module, "_LINGER_SECONDS", 60)
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
