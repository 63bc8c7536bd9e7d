# SPDX-License-Identifier: Apache-2.0
"""Offers, replies and proofs that are false: the payload is received in segments, and nothing else happens."""

from __future__ import annotations

import os

import pytest
import torch
from nvflare.fuel.f3.streaming.download_service import ProduceRC

from nvflare_lazy.errors import ProtocolError
from nvflare_lazy.scratch import JobScratch
from nvflare_lazy.scratch.rendezvous import host_token
from nvflare_lazy.transport import _nvflare_private
from nvflare_lazy.transport._backends import TORCH
from nvflare_lazy.transport._disk_consumer import DiskConsumer
from nvflare_lazy.transport._downloadable import Payload
from nvflare_lazy.transport._memory_consumer import MemoryConsumer
from nvflare_lazy.transport.handoff import client, wire
from nvflare_lazy.transport.handoff.copies import Copies
from nvflare_lazy.transport.handoff.layout import Layout
from nvflare_lazy.transport.handoff.server import HandoffServer
from nvflare_lazy.transport.handoff.way import Handoff
from nvflare_lazy.transport.limits import PayloadLimits, PayloadTally
from nvflare_lazy.transport.offload import ReceiveMode, TransferRuntime
from nvflare_lazy.transport.receive import RemotePayload, receive
from nvflare_lazy.transport.segments import protocol
from tests.transport.fake_cell import SENDER, FakeCell, Sender

VALUES = {f"T{i}": torch.arange(30_000, dtype=torch.float32) + i for i in range(4)}
TENSOR = 120_000
NONCE = "0123456789abcdef" * 2
OTHER = "f" * 32


class HandingSender(Sender):
    """Offers a payload by handoff; its replies to proofs are a script, which ends when segments are requested."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.answers = []
        self.offered = ()

    def on_request(self, fields, take):
        if fields["what"] == protocol.DATA:
            self.answers = []
        return super().on_request(fields, take)

    def replies(self):
        self.offer = {**self.offer, "rendezvous": list(self.offered)}
        yield from super().replies()
        for answer in self.answers:
            if not self.answers:
                return  # the receiver continues in segments
            state = {"start": 0, "count": 0, protocol.KEY: answer}
            yield {_nvflare_private.STATUS: ProduceRC.OK, _nvflare_private.DATA: [], _nvflare_private.STATE: state}


@pytest.fixture
def root(tmp_path):
    return tmp_path / "scratch"


@pytest.fixture
def job(root):
    with JobScratch.open(root, job="sender") as job:
        yield job


@pytest.fixture
def files(job):
    """The files of the payload, as a true reply names them."""
    payload = Payload(VALUES, TORCH)
    layout = Layout(payload, job, job.rendezvous(), Copies())
    assert layout.wait(60)
    yield layout.files.to_fields()["files"]
    layout.release()


def download(root, job, answers, *, to_disk=True, quota=None, handoff=True, progress=None, **offer):
    """Receive the payload; return how, and the bytes that the quota counts."""
    sender = HandingSender.of(VALUES, TORCH)
    sender.answers = answers
    sender.offered = wire.RendezvousOffer(NONCE, host_token(NONCE), job.rendezvous().lease)._replace(**offer)
    cell, runtime = FakeCell(), TransferRuntime()
    cell.connect(sender)
    with JobScratch.open(root, job="receiver", quota=quota) as scratch:
        runtime.use(ReceiveMode(scratch, 32 << 20, handoff=handoff))
        consumer = DiskConsumer(TORCH, scratch.download()) if to_disk else MemoryConsumer(TORCH)
        receive(consumer, RemotePayload(runtime, cell, SENDER, "ref"), progress)
        values = consumer.values() if to_disk else consumer.result
        assert all(torch.equal(values[name].contiguous() + 0, value) for name, value in VALUES.items())
        used = scratch.used
        del values
    return consumer.way, used


@pytest.mark.parametrize("to_disk", [True, False])
def test_true_files(root, job, files, to_disk, monkeypatch):
    """What the false ones below are made of: the files are taken, after some waiting, in which progress is counted."""
    monkeypatch.setattr("nvflare_lazy.transport.receive._PROGRESS_SECONDS", 0.0)
    answers = [{"files": "wait", "done": done} for done in (0, TENSOR)] + [{"files": files}]
    events = []
    way, used = download(root, job, answers, to_disk=to_disk, progress=lambda **event: events.append(event))
    assert way == "by handoff"
    assert [event["bytes_done"] for event in events if event["state"] == "active"][-2:] == [TENSOR, 4 * TENSOR]
    assert [events[0]["bytes_done"], events[-1]["bytes_done"], events[-1]["items_done"]] == [0, 4 * TENSOR, 4]
    assert used == (files[0][0][1] if to_disk else 0)


@pytest.mark.parametrize(
    "offer",
    [
        {"host_token": host_token("another")},
        {"lease": "job-" + "0" * 16},
        {"lease": "../" + "job-" + "0" * 16},
        {"lease": "/etc"},
        {"nonce": "short"},
        {"nonce": 7},
        {"lease": None},
    ],
)
def test_false_offers(root, job, files, offer, monkeypatch):
    """Another host, or no directory of this user: the receiver asks for no files."""
    monkeypatch.setattr(client.FileDownload, "_ask", lambda *_: pytest.fail("asked"))
    assert download(root, job, [], **offer)[0] == "in segments"


def test_switched_off(root, job, files, monkeypatch):
    """Without the option, files are neither offered nor asked for."""
    monkeypatch.setattr(client.FileDownload, "_ask", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(wire, "MIN_BYTES", 0)
    assert download(root, job, [], handoff=False)[0] == "in segments"
    runtime, payload = TransferRuntime(), Payload(VALUES, TORCH)
    way = Handoff()
    way.serve(payload, "ref", FakeCell(), runtime)
    for handoff in (True, False):
        runtime.use(ReceiveMode(job, 32 << 20, handoff=handoff))
        assert bool(way.offer(payload, "ref", runtime)) == handoff


def changed(true, **parts):
    """A reply with other files or runs."""
    return {"files": [parts.get("files", true[0]), parts.get("runs", true[1])]}


FALSE_REPLIES = {
    "nothing": lambda files: {},
    "none": lambda files: {"files": None},
    "text": lambda files: {"files": "soon"},
    "a long wait": lambda files: {"files": "wait", "done": 1 << 40},
    "a negative wait": lambda files: {"files": "wait", "done": -1},
    "a wait of true": lambda files: {"files": "wait", "done": True},
    "no files": lambda files: changed(files, files=[]),
    "a path": lambda files: changed(files, files=[["../" + files[0][0][0][3:], files[0][0][1]]]),
    "an absolute path": lambda files: changed(files, files=[["/etc/passwd", files[0][0][1]]]),
    "the probe": lambda files: changed(files, files=[["probe", 32]]),
    "an unknown id": lambda files: changed(files, files=[[OTHER, files[0][0][1]]]),
    "one of two": lambda files: changed(
        files,
        files=[*files[0], [OTHER, TENSOR]],
        runs=[[0, 3 * TENSOR, 0, files[1][0][3]], [3 * TENSOR, TENSOR, 1, 0]],
    ),
    "a larger file": lambda files: changed(files, files=[[files[0][0][0], files[0][0][1] + 1]]),
    "a smaller file": lambda files: changed(files, files=[[files[0][0][0], files[0][0][1] - 1]]),
    "a huge file": lambda files: changed(files, files=[[files[0][0][0], 1 << 61]]),
    "one file twice": lambda files: changed(files, files=files[0] * 2),
    "a file without a run": lambda files: changed(files, files=[*files[0], [OTHER, 7]]),
    "no runs": lambda files: changed(files, runs=[]),
    "an overlap": lambda files: changed(files, runs=[[0, 4 * TENSOR - 4, 0, 500], [4 * TENSOR - 8, 8, 0, 500]]),
    "a gap": lambda files: changed(files, runs=[[0, TENSOR, 0, 500], [TENSOR + 4, 3 * TENSOR - 4, 0, 500]]),
    "a late start": lambda files: changed(files, runs=[[4, 4 * TENSOR - 4, 0, 500]]),
    "an early end": lambda files: changed(files, runs=[[0, 4 * TENSOR - 4, 0, 500]]),
    "past the end": lambda files: changed(files, runs=[[0, 4 * TENSOR, 0, files[0][0][1] - 4 * TENSOR + 1]]),
    "an empty run": lambda files: changed(files, runs=[[0, 0, 0, 0], *files[1]]),
    "another file": lambda files: changed(files, runs=[[0, 4 * TENSOR, 1, 500]]),
    "a negative offset": lambda files: changed(files, runs=[[0, 4 * TENSOR, 0, -4]]),
    "a torn tensor": lambda files: changed(files, runs=[[0, 8, 0, 500], [8, 4 * TENSOR - 8, 0, 500]]),
    "too many runs": lambda files: changed(files, runs=[[i * 4, 4, 0, 500] for i in range(4097)]),
    "runs of text": lambda files: changed(files, runs=["0123"]),
    "runs of floats": lambda files: changed(files, runs=[[0.0, float(4 * TENSOR), 0.0, 500.0]]),
}


@pytest.mark.parametrize("reply", FALSE_REPLIES)
def test_false_replies(root, job, files, reply):
    """The payload arrives in segments, and the quota has it once."""
    way, used = download(root, job, [FALSE_REPLIES[reply](files)], quota=4 * TENSOR + 5000)
    assert way == "in segments"
    assert used <= 4 * TENSOR + 5000


def test_quota_of_the_receiver(root, job, files, monkeypatch):
    """A link that exceeds the quota is not taken; into memory, files are only read."""
    file = [files[0][0][0], files[0][0][1]]
    assert download(root, job, [changed(files, files=[file])], to_disk=False, quota=1000)[0] == "by handoff"


def test_sender_that_never_finishes(root, job, monkeypatch):
    """If a sender's disk accepts nothing, it is requested to send segments after a while."""
    monkeypatch.setattr(client, "_STALL_SECONDS", 0.05)
    assert download(root, job, [{"files": "wait", "done": 5}] * 100)[0] == "in segments"


def test_limits_come_first(root, job, files):
    """A payload above the size limit of the message is refused before a file is requested."""
    sender = HandingSender.of(VALUES, TORCH)
    sender.answers = [{"files": files}]
    sender.offered = wire.RendezvousOffer(NONCE, host_token(NONCE), job.rendezvous().lease)
    cell, runtime = FakeCell(), TransferRuntime()
    cell.connect(sender)
    with JobScratch.open(root, job="receiver") as scratch:
        runtime.use(ReceiveMode(scratch, 32 << 20))
        tally = PayloadTally(PayloadLimits(nbytes=TENSOR))
        with pytest.raises(ProtocolError, match="more than the limit"):
            receive(DiskConsumer(TORCH, scratch.download()), RemotePayload(runtime, cell, SENDER, "ref", tally=tally))
        assert scratch.used == 0


def test_proofs(root, job, monkeypatch):
    """Only the proof for this payload, this sender and this receiver makes the sender write anything."""
    monkeypatch.setattr(wire, "MIN_BYTES", 0)
    runtime, payload = TransferRuntime(), Payload(VALUES, TORCH)
    runtime.use(ReceiveMode(job, 32 << 20))
    server = HandoffServer()
    server.serve("ref", payload, "server.job")
    (_, _, lease) = server.offer("ref", payload, runtime)["rendezvous"]
    with JobScratch.open(root, job="receiver") as other, other.visit(lease) as visited:
        for sender, receiver, ref in (
            ("server.job", "site-1.job", "another"),
            ("site-2.job", "site-1.job", "ref"),
            ("server.job", "site-2.job", "ref"),
        ):
            proof = visited.proof(wire.proof_text(sender, receiver, ref))
            assert server.answer("ref", proof, "site-1.job", runtime) == {"files": None}
        assert server.answer("ref", "", "site-1.job", runtime) == {"files": None}
        assert os.listdir(job.path / "handoff") == ["probe"]
        assert job.used == 0
        proof = visited.proof(wire.proof_text("server.job", "site-1.job", "ref"))
        while (fields := server.answer("ref", proof, "site-1.job", runtime)).get("files") == "wait":
            pass
        assert wire.reply_from_fields(fields, payload.manifest.nbytes).files
        server.withdraw("ref")
        assert server.answer("ref", proof, "site-1.job", runtime) == {"files": None}
        assert os.listdir(job.path / "handoff") == ["probe"]
