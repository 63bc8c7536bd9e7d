# SPDX-License-Identifier: Apache-2.0
"""Data in flight has a limit, and slow receivers a part of it; a connection that blocks others is closed."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace

import pytest

from nvflare_lazy.transport import _nvflare_private
from nvflare_lazy.transport.segments import _send_limits
from nvflare_lazy.transport.segments._send_limits import PausedReceivers, Send, SendBudget

MIB = 1 << 20


@pytest.fixture
def pair():
    """Both ends of a TCP connection; the first as NVFlare's driver holds it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    with left, right:
        left.setblocking(False)
        closed = []
        yield SimpleNamespace(sock=left, close=lambda: closed.append(True), closed=closed), right


def fill(sock):
    """Write until the kernel takes no more; return how much it took."""
    written = 0
    while True:
        try:
            written += sock.send(bytes(MIB))
        except BlockingIOError:
            return written


def drain(sock, count):
    while count:
        count -= len(sock.recv(min(count, MIB)))


def test_room(pair):
    """A connection is free until the kernel's buffers are full, and again when the peer has read."""
    connection, peer = pair
    assert _nvflare_private.has_room(connection, 0)
    written = fill(connection.sock)
    assert not _nvflare_private.has_room(connection, 0.05)
    before = _nvflare_private.nbytes_taken(connection)
    drain(peer, written)
    assert _nvflare_private.has_room(connection, 60)
    assert 0 < before < written
    assert _nvflare_private.nbytes_taken(connection) > before
    connection.sock.close()
    assert _nvflare_private.has_room(connection, 0)  # the send will fail
    assert _nvflare_private.has_room(None, 0)


def test_limit():
    """Sends wait for the limit; one that is larger than it goes alone."""
    budget = SendBudget(4 * MIB)
    first, second, third = (Send(2 * MIB, name, None) for name in "abc")
    assert budget.acquire(first, 0)
    assert budget.acquire(second, 0)
    assert not budget.acquire(third, 0.01)
    threading.Timer(0.05, budget.release, [first]).start()
    assert budget.acquire(third, 60)
    assert budget.used == 4 * MIB
    budget.release(second)
    budget.release(third)
    huge = Send(9 * MIB, "d", None)
    assert budget.acquire(huge, 0)
    assert not budget.acquire(first, 0)
    budget.release(huge)
    assert budget.used == 0


def test_slow_receivers_share_half(monkeypatch):
    """Receivers whose last segment took long leave half of the limit to the others."""
    monkeypatch.setattr(_send_limits, "_SLOW_SECONDS", -1.0)
    budget = SendBudget(8 * MIB)
    for number in range(10):
        send = Send(2 * MIB, f"slow-{number}", None)
        assert budget.acquire(send, 0)
        budget.release(send)
    again = [Send(2 * MIB, f"slow-{number}", None) for number in range(3)]
    assert [budget.acquire(send, 0) for send in again] == [True, True, False]
    assert [budget.acquire(Send(2 * MIB, name, None), 0) for name in "ab"] == [True, True]
    monkeypatch.setattr(_send_limits, "_SLOW_SECONDS", 60.0)
    for send in again[:2]:
        budget.release(send)  # in time: no longer slow
    assert budget.acquire(Send(4 * MIB, "slow-0", None), 0)


def test_blocked_connection_is_closed(pair, monkeypatch, caplog):
    """A connection that takes nothing is closed if another receiver waits for it; one that takes something is not."""
    connection, peer = pair
    monkeypatch.setattr(_send_limits, "_OVERDUE_SECONDS", 0.2)
    monkeypatch.setattr(_send_limits, "_MIN_PROGRESS_BYTES", 1)
    budget = SendBudget(2 * MIB)
    written = fill(connection.sock)
    send = Send(2 * MIB, "blocked", connection)
    assert budget.acquire(send, 0)
    time.sleep(0.3)
    assert not budget.acquire(Send(2 * MIB, "the same", connection), 0)
    assert connection.closed == []
    drain(peer, written // 2)
    deadline = time.monotonic() + 60
    while _nvflare_private.nbytes_taken(connection) == send.taken and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not budget.acquire(Send(2 * MIB, "another", None), 0)
    assert connection.closed == []
    while not connection.closed and time.monotonic() < deadline:
        budget.permits(Send(2 * MIB, "another", None), 0.02)
    assert connection.closed == [True]
    assert "blocked" in caplog.text


def test_paused_receivers(monkeypatch):
    """A receiver is served when its condition is true; the thread ends with the last."""
    paused, served = PausedReceivers(), []
    states = {name: threading.Event() for name in "ab"}
    for name, event in states.items():
        paused.call_when(name, event.is_set, lambda name=name: served.append(name))
    deadline = time.monotonic() + 60
    for name in "ba":
        states[name].set()
        while name not in served and time.monotonic() < deadline:
            time.sleep(0.005)
    assert served == ["b", "a"]
    while paused._running and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not paused._running
