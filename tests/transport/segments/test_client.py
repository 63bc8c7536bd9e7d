# SPDX-License-Identifier: Apache-2.0
"""Patience: how long a receiver waits for a sender that is silent, cannot be reached, or only seems to be silent."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from nvflare_lazy.errors import DiskFullError, PeerLostError, ProtocolError, QuotaExceededError
from nvflare_lazy.scratch import JobScratch
from nvflare_lazy.transport._backends import TORCH
from nvflare_lazy.transport._disk_consumer import DiskConsumer
from nvflare_lazy.transport._memory_consumer import MemoryConsumer
from nvflare_lazy.transport.offload import TransferRuntime
from nvflare_lazy.transport.receive import RemotePayload, receive
from nvflare_lazy.transport.segments import client, protocol
from tests.transport.fake_cell import SENDER, FakeCell, Sender

MIB = 1 << 20
VALUES = {f"T{i}": torch.full((MIB,), i, dtype=torch.uint8) for i in range(40)}
GOOD = Sender.of(VALUES, TORCH)


class Clock:
    """Half a second passes each time a receiver looks at it, and 10,000 s when it has looked `until_pause` times."""

    def __init__(self):
        self.now = 1000.0
        self.until_pause = 0

    def monotonic(self):
        self.until_pause -= 1
        self.now += 10_000 if self.until_pause == 0 else 0.5
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(client, "time", clock)
    monkeypatch.setattr(client, "_POLL_SECONDS", 0.0005)
    return clock


class Pausing(Sender):
    """Sends nothing, or cannot be reached, for some seconds after a number of requests, which are lost."""

    def __init__(self, clock, seconds, after=10, error=None):
        super().__init__(GOOD.encoded, GOOD.data, len(VALUES))
        self._clock, self._seconds, self._after, self._error = clock, seconds, after, error
        self.until = 0.0

    def on_request(self, fields, take):
        if self.requests == self._after:
            self.until = self._clock.now + self._seconds
        if self._clock.now < self.until:
            self.requests += 1
            return self._error
        return super().on_request(fields, take)


def disk_usage(directory):
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def download(sender, timeout=600.0, consumer=None, runtime=None):
    cell = FakeCell()
    cell.connect(sender)
    runtime = runtime or TransferRuntime()
    try:
        result = receive(consumer or MemoryConsumer(TORCH), RemotePayload(runtime, cell, SENDER, "ref", timeout))
    finally:
        assert runtime.budget.used == 0
    if consumer is None:
        assert result.keys() == VALUES.keys()
        assert all(torch.equal(result[name], value) for name, value in VALUES.items())
    return result


def test_silence_within_the_limit(clock):
    """A sender that is paused in mid-transfer is waited for, as long as the transfer's own time limit."""
    download(Pausing(clock, 500.0))


def test_silence_beyond_the_limit(clock):
    """After the limit the sender counts as lost."""
    began = clock.now
    with pytest.raises(PeerLostError, match=r"has sent nothing for 6[0-9] s"):
        download(Pausing(clock, 1e9), timeout=60.0)
    assert clock.now - began < 100


def test_pause_of_the_receiver(clock):
    """A pause of the receiver's own process, in which its answers wait in the socket, is not the sender's silence."""

    clock.until_pause = 45
    sender = Pausing(clock, 10_020.0)
    download(sender, timeout=60.0)
    assert clock.until_pause < 0
    assert clock.now > sender.until


def test_connection_that_is_restored(clock):
    """Requests that cannot be sent are sent again: NVFlare restores connections."""
    sender = Pausing(clock, 90.0, error="target_unreachable")
    download(sender)
    assert sender.requests < 200


def test_connection_that_is_lost(clock):
    """If requests cannot be sent for long, the sender is given up before the time limit."""
    began = clock.now
    with pytest.raises(PeerLostError, match=f"{SENDER} has been unreachable"):
        download(Pausing(clock, 1e9, error="target_unreachable"))
    assert 120 < clock.now - began < 200


@pytest.mark.parametrize("payload", ["text", 7, {"a": 1}, [b"x"], 1.5])
def test_payloads_that_are_not_bytes(payload):
    """A reply that carries something else than bytes is a named error, not an exception in a thread of NVFlare."""

    class Odd(Sender):
        def on_request(self, fields, take):
            take(protocol.Data(fields["to"], fields["at"]).to_headers(), payload)

    with pytest.raises(ProtocolError, match="but bytes were requested"):
        download(Odd(GOOD.encoded, GOOD.data, len(VALUES)))


@pytest.mark.parametrize("limit", ["quota", "disk"])
def test_a_stalled_download_keeps_no_space(clock, tmp_path, limit, monkeypatch):
    """The space for its rest is released after a while, so that others have it; it is reserved again as bytes arrive.

    A payload larger than the free space is refused before the first byte of it is requested.
    """
    room = 60 * MIB
    with JobScratch.open(tmp_path, job="tests", quota=room if limit == "quota" else None, min_free=0) as job:
        if limit == "disk":
            monkeypatch.setattr(
                "nvflare_lazy.scratch._quota.os.statvfs",
                lambda _: SimpleNamespace(f_frsize=1, f_bavail=room - disk_usage(job.path)),
            )
        seen = []

        class Stalling(Pausing):
            def on_request(self, fields, take):
                if self.requests == self._after:
                    seen.append(job.used)
                    with pytest.raises((QuotaExceededError, DiskFullError)):
                        download(Pausing(Clock(), 0.0), consumer=DiskConsumer(TORCH, job.download("site-2")))
                elif self.until and self._clock.now >= self.until and len(seen) == 1:
                    seen.append(job.used)
                return super().on_request(fields, take)

        consumer = DiskConsumer(TORCH, job.download("site-1"))
        download(Stalling(clock, 100.0), consumer=consumer)
        before, after = seen
        assert before > 40 * MIB
        assert after < 24 * MIB
        values = consumer.values()
        assert all(torch.equal(values[name].materialize(), value) for name, value in VALUES.items())
        assert 40 * MIB < job.used < 41 * MIB
        del values, consumer
        gc.collect()  # the errors of the other downloads refer to the frames of this one
        assert job.used == 0


@pytest.mark.parametrize("to_disk", [False, True], ids=["to memory", "to disk"])
@pytest.mark.parametrize("listed", [False, True], ids=["the list is sent", "the list is in the offer"])
def test_first_request(listed, to_disk, tmp_path):
    """A short list of tensors is part of the offer, and needs no request."""
    runtime = TransferRuntime()
    sender = Sender(GOOD.encoded, GOOD.data, len(VALUES))
    if listed:
        sender.offer = protocol.Offer.of(len(VALUES), len(GOOD.data), GOOD.encoded).to_state()
    if to_disk:
        with JobScratch.open(tmp_path, job="tests", min_free=0) as scratch:
            consumer = DiskConsumer(TORCH, scratch.download())
            download(sender, consumer=consumer, runtime=runtime)
            values = consumer.values()
            assert all(torch.equal(values[name].materialize(), value) for name, value in VALUES.items())
            del values, consumer
    else:
        download(sender, runtime=runtime)
    assert sender.asked_for == ({protocol.DATA} if listed else {protocol.DATA, protocol.MANIFEST})


@pytest.mark.parametrize("listed", [b"", b"x", GOOD.encoded[:-1], "text", None, 7, [GOOD.encoded], b"x" * (1 << 20)])
def test_a_list_that_is_not_in_the_offer(listed):
    """A list of another length or type than the offer says is not read: the receiver asks for it."""
    sender = Sender(GOOD.encoded, GOOD.data, len(VALUES))
    sender.offer["list"] = listed
    download(sender)
    assert protocol.MANIFEST in sender.asked_for


def test_a_list_that_is_false():
    """A list in the offer is checked as one that is sent."""
    sender = Sender(GOOD.encoded, GOOD.data, len(VALUES))
    sender.offer["list"] = bytes(len(GOOD.encoded))
    with pytest.raises(ProtocolError):
        download(sender)
