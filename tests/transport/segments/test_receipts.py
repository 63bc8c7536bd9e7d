# SPDX-License-Identifier: Apache-2.0
"""What a site is sent without proof has a limit; receipts that get lost, or whose messages do, stop no download."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from nvflare.fuel.f3.message import Message

from nvflare_lazy.transport.segments import _receipts, protocol
from nvflare_lazy.transport.segments._receipts import ReceiptsToReturn, UnprovenData

MIB = 1 << 20


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(_receipts, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def fill(unproven, receiver, transfer="first", nbytes=2 * MIB):
    """Send until the limit is reached; return the receipts."""
    receipts = []
    while unproven.permits(receiver, transfer, nbytes):
        receipts.append(unproven.add(receiver, transfer, nbytes))
    assert unproven.add(receiver, transfer, nbytes) is None
    return receipts


def test_limit(clock):
    """The cells of a site share a limit; only its own receipts, each counted once, free capacity."""
    unproven = UnprovenData()
    receipts = fill(unproven, "site-1.job")
    assert len(set(receipts)) == 8
    assert unproven.permits("site-2.job", "first", 4 * MIB)
    unproven.prove("site-2.job", tuple(receipts))
    unproven.prove("site-1", (b"", bytes(8), receipts[0][:-1]))
    assert fill(unproven, "site-1.job") == []
    for _ in range(2):
        unproven.prove("site-1.other", tuple(receipts[:3]))
    assert len(fill(unproven, "site-1.job")) == 3
    unproven.discard("site-1", receipts[-1])
    assert len(fill(unproven, "site-1.job")) == 1


@pytest.mark.parametrize(("nbytes", "messages"), [(0, 40), (1, 40), (MIB, 20), (4 * MIB, 5)])
def test_any_names(clock, nbytes, messages):
    """Small messages also count; more cells and more transfers of a site get no more."""
    unproven = UnprovenData()
    receipts = [unproven.add(f"site-1.{number}", str(number), nbytes) for number in range(1000)]
    assert sum(receipt is not None for receipt in receipts) == messages


def test_beside_what_stopped(clock):
    """If one download of a site has stopped, another one continues, message by message."""
    unproven = UnprovenData()
    stopped = fill(unproven, "site-1.job", "stopped")
    for _ in range(100):
        receipt = unproven.add("site-1.job", "goes on", 2 * MIB)
        assert not unproven.permits("site-1.job", "goes on", 2 * MIB)
        unproven.prove("site-1.job", (receipt,))
    unproven.prove("site-1.job", tuple(stopped))
    assert len(fill(unproven, "site-1.job", "goes on")) == 8


def test_lost(clock):
    """A receipt proves that much older messages to the same cell are lost; others count until they are very old."""
    unproven = UnprovenData()
    for number, receiver in enumerate(("site-1.a", "site-1.b", "site-1.a", "site-1.a")):
        unproven.add(receiver, str(number), 4 * MIB)
    for seconds, permitted in ((29, False), (1, True)):
        clock.now += seconds
        unproven.prove("site-1.a", (unproven.add("site-1.a", "later", 4 * MIB),))
        assert unproven.permits("site-1.b", "1", 4 * MIB) == permitted
    assert len(fill(unproven, "site-1.b", "1", 4 * MIB)) == 3


def test_silence(clock):
    """A site that proves nothing gets 8 KiB/s beyond the limit, however long it asks."""
    unproven = UnprovenData()
    sent = 0
    for _ in range(36_000):
        sent += 2 * MIB * (unproven.add("site-1.a", "first", 2 * MIB) is not None)
        clock.now += 0.5
    assert 16 * MIB + 5 * 3600 * 7000 < sent <= 20 * MIB + 5 * 3600 * 8192


@pytest.mark.parametrize("seed", range(20))
def test_every_download_ends(clock, seed):
    """Messages and receipts get lost at random; receivers that ask again have all in the end."""
    random.seed(seed)
    unproven, returned = UnprovenData(), ReceiptsToReturn()
    lost = random.choice([0.0, 0.01, 0.1, 0.3])
    cells = [f"site-1.{number}" for number in range(random.choice([1, 2, 8]))]
    missing = {cell: set(range(50)) for cell in cells}
    returned.take("", "server")
    for _ in range(200_000):
        if not any(missing.values()):
            break
        cell = random.choice([cell for cell in cells if missing[cell]])
        receipts = returned.take(cell, "server")
        if random.random() >= lost:
            unproven.prove(cell, receipts)
            receipt = unproven.add(cell, cell, 2 * MIB)
            if receipt is not None and random.random() >= lost:
                returned.add(cell, "server", receipt)
                missing[cell].pop()
        clock.now += random.choice([0.1, 0.1, 0.1, 30.0])
    assert not any(missing.values())


def test_only_senders_that_were_asked(monkeypatch):
    """Receipts are kept for a cell that was asked, to be returned by the cell that got them, once."""
    monkeypatch.setattr(_receipts, "_MAX_SITES", 2)
    monkeypatch.setattr(_receipts, "_MAX_RECEIPTS", 3)
    returned = ReceiptsToReturn()
    returned.add("server", "site-1", b"1")
    returned.add("server", ["site-1"], b"2")
    assert returned.take("server", "site-1") == ()
    for number in b"345678":
        returned.add("server", "site-1", bytes([number]))
    assert returned.take("other", "site-1") == ()
    assert returned.take("server", "site-1") == (b"3", b"4", b"5")
    assert returned.take("server", "site-1") == ()
    for name in "ab":
        returned.take("server", name)
    returned.add("server", "site-1", b"1")
    assert returned.take("server", "site-1") == ()


@pytest.mark.parametrize("got", [None, 7, "text", {"a": 1}, [7, None, "x", b"y" * 17, b"right"], [b"right"] * 10_000])
def test_rubbish(got):
    """Of a receiver's answer, only a few short byte strings are read."""
    fields = {"to": "number", "ref": "ref", "what": "data", "at": 0, "n": 1, "got": got}
    receipts = protocol.Request.from_message(Message({protocol.KEY: fields}, None)).receipts
    assert set(receipts) <= {b"right"}
    assert len(receipts) <= 256
    assert protocol.receipts_from_fields(got) == ()
