# SPDX-License-Identifier: Apache-2.0
"""The line in which requests for segments wait: fair between receivers, and of a length that nobody can choose."""

from __future__ import annotations

import threading
import time
from unittest.mock import MagicMock

import pytest
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message

from nvflare_lazy.transport.segments import protocol
from nvflare_lazy.transport.segments import server as server_module
from nvflare_lazy.transport.segments.server import SegmentServer


@pytest.fixture
def served(monkeypatch):
    """A server that notes what it answers, as soon as it may, and the function that sends it a request."""
    gate, answered, core = threading.Event(), [], MagicMock()

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
    """What is in line is not put in line again; a receiver's requests are answered in order."""
    ask, gate, answered = served
    for start in (0, 8, 16, 8, 16, 24):
        ask("site-1", start)
    gate.set()
    assert wait_for(answered, 4) == 4
    assert answered == [("site-1", start) for start in (0, 8, 16, 24)]


def test_without_end(served, monkeypatch):
    """Whoever asks and asks has a line of limited length, and keeps nobody else waiting."""
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
    """They take turns: everybody has the first answer before anybody has the third."""
    ask, gate, answered = served
    for requester in ("first", "second"):
        ask(requester, 0)  # these hold both threads until everybody is in line
    for requester in "abcdefgh":
        for start in range(3):
            ask(requester, start)
    gate.set()
    assert wait_for(answered, 26) == 26
    first = max(answered.index((requester, 0)) for requester in "abcdefgh")
    third = min(answered.index((requester, 2)) for requester in "abcdefgh")
    assert first < third


def test_rubbish(served, caplog):
    """Requests that make no sense are ignored, and said to be."""
    ask, gate, answered = served
    gate.set()
    ask("site-1", -1)
    ask("site-1", 1 << 63)
    ask("site-1", 8)
    assert wait_for(answered, 1) == 1
    assert len([record for record in caplog.records if "ignored" in record.message]) == 2
