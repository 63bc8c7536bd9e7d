# SPDX-License-Identifier: Apache-2.0
"""The list of ways: another one takes part by being in it, and is passed over where it cannot be used."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from nvflare.fuel.f3.streaming.download_service import ProduceRC

from nvflare_lazy.transport import ways
from nvflare_lazy.transport._backends import TORCH
from nvflare_lazy.transport._downloadable import PayloadDownloadable
from nvflare_lazy.transport._memory_consumer import MemoryConsumer
from nvflare_lazy.transport.offload import TransferRuntime
from nvflare_lazy.transport.receive import RemotePayload

VALUES = {"T0": torch.arange(6.0).reshape(2, 3), "T1": torch.tensor(7), "T2": torch.arange(6.0).reshape(2, 3)}


class Served(dict):
    """What all transfers of a process share."""


class Ended(list):
    """What receivers said at the end."""


class WithinTheProcess:
    """A way of the test's own: both ends are one process, so that the receiver reads the sender's payload itself."""

    description = "within the process"

    def __init__(self, blocked=False):
        self.blocked = blocked

    def serve(self, payload, ref_id, cell, runtime):
        runtime.shared(Served)[ref_id] = payload

    def offer(self, payload, ref_id, runtime):
        return {"within_the_process": len(payload.names)}

    def withdraw(self, ref_id, runtime):
        del runtime.shared(Served)[ref_id]

    def recognize(self, state):
        return state.get("within_the_process")

    def receive(self, offer, download):
        if self.blocked:
            return None
        payload = download.remote.runtime.shared(Served)[download.remote.ref_id]
        sink = download.open_sink(payload.manifest)
        sink.write(0, memoryview(payload.read(0, payload.manifest.nbytes)))
        return {"start": offer, "count": 0, "within_the_process": "done"}

    def answer(self, state, ref_id, receiver, runtime):
        runtime.shared(Ended).append((receiver, state.get("within_the_process")))


class Cell:
    """Takes registrations, and answers a request for further items with nothing that NVFlare would take for items."""

    def __init__(self):
        self.core_cell = MagicMock()

    def send_request(self, **_):
        return SimpleNamespace(payload=None, get_header=lambda _: None)


def download(runtime):
    """Send and receive as NVFlare's loop does; return the receiver, and the sender's initial state."""
    cell = Cell()
    sender = PayloadDownloadable(VALUES, 1 << 20, TORCH, cell, runtime)
    sender.set_transaction("tx", "ref")
    consumer = MemoryConsumer(TORCH)
    consumer.attach(RemotePayload(runtime, cell, "a", "ref"))
    code, items, state = sender.produce(None, "b")
    first = dict(state)
    while code == ProduceRC.OK:
        code, items, state = sender.produce(consumer.consume("ref", state, items), "b")
    assert code == ProduceRC.EOF
    consumer.download_completed("ref")
    sender.transaction_done("tx", "done")
    return consumer, first


@pytest.mark.parametrize("place", [0, 1])
def test_a_third_way(monkeypatch, place):
    """One entry in the list: the sender offers it, and the receiver takes it unless it recognizes a better one."""
    runtime, segments = TransferRuntime(), ways.WAYS[-1]
    third = WithinTheProcess()
    monkeypatch.setattr(ways, "WAYS", (third, segments) if place == 0 else (segments, third))
    if place:
        monkeypatch.setattr(type(segments), "recognize", lambda *_: None)
    consumer, first = download(runtime)
    assert {"nvflare_lazy", "within_the_process"} <= set(first)
    assert consumer.way == "within the process"
    assert list(consumer.result) == list(VALUES)
    assert all(torch.equal(consumer.result[name], value) for name, value in VALUES.items())
    assert runtime.shared(Served) == {}
    assert runtime.shared(Ended) == [("b", "done")]
    assert runtime.senders_with_package == {"a"}


def test_what_is_blocked_is_passed_over(monkeypatch):
    """The next way is tried with the same offer, and NVFlare's own items at last."""
    runtime, tried, segments = TransferRuntime(), [], ways.WAYS[-1]
    monkeypatch.setattr(type(segments), "receive", lambda self, offer, download: tried.append(offer.items))
    monkeypatch.setattr(ways, "WAYS", (WithinTheProcess(blocked=True), segments))
    consumer, _ = download(runtime)
    assert tried == [3]
    assert consumer.way == "as whole tensors"
    assert all(torch.equal(consumer.result[name], value) for name, value in VALUES.items())
