# SPDX-License-Identifier: Apache-2.0
"""NVFlare's http driver takes no message of 4 MiB or more: this package sends smaller ones in every way."""

from __future__ import annotations

import time

import pytest

from nvflare_lazy.transport.segments import protocol
from tests.transport import scenes
from tests.transport.peers import CHANNEL, Net

MIB = 1 << 20
# NVFlare's frame and headers, which include the receipts of a request and the route of a message.
MAX_HEADERS = 64 << 10


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    scratch = str(tmp_path_factory.mktemp("scratch"))
    with Net(scratch, scheme="http", server=True, site_1=True, site_2=False) as net:
        net["site_1"].call(scenes.offload, True)
        for peer in net.peers.values():
            peer.call(watch_frames)
        yield net


def watch_frames(state):
    """Remember the largest frame that this process gives to a connection of the http driver."""
    from nvflare.fuel.f3.drivers.aio_http_driver import WsConnection

    send, state.kept["largest"] = WsConnection.send_frame, 0

    def send_and_note(self, frame):
        state.kept["largest"] = max(state.kept["largest"], len(frame))
        send(self, frame)

    WsConnection.send_frame = send_and_note


def largest_frame(state):
    largest, state.kept["largest"] = state.kept["largest"], 0
    return largest


def forget(net):
    for peer in net.peers.values():
        peer.call(forget_payloads)


def forget_payloads(state):
    state.payloads.clear()


@pytest.mark.parametrize(
    ("sender", "receiver", "kind"),
    [
        ("server", "site_1", "one large tensor"),
        ("server", "site_1", "long names"),
        ("site_1", "server", "one large tensor"),
        ("server", "site_2", "one large tensor"),
        ("site_2", "server", "one large tensor"),
    ],
    ids=["task", "task with a long list", "result", "task to NVFlare", "result of NVFlare"],
)
def test_every_way(net, sender, receiver, kind):
    """A tensor larger than a message, and a list of tensors that is: both arrive, in smaller messages."""
    net[sender].call(make_payload, kind)
    assert net[sender].call(send_payload, net[receiver].fqcn) == "ok"
    assert net[receiver].call(nbytes_of_payload) == net[sender].call(nbytes_to_send)
    assert MIB // 2 < net[sender].call(largest_frame) < protocol.MAX_REQUEST_BYTES + MAX_HEADERS
    forget(net)


def test_reading_one_item_at_a_hop(net):
    """So it is when a hop reads one tensor by its reference."""
    net["server"].call(make_payload, "one large tensor")
    assert net["server"].call(send_payload, "site-1", pass_through=True) == "ok"
    assert net["site_1"].call(read_reference) == 24 * MIB
    assert MIB < net["server"].call(largest_frame) < 4 * MIB
    forget(net)


def test_the_limit(net):
    """A message of 4 MiB closes the connection; the largest answer that a sender gives to a request does not."""
    net["site_2"].call(listen)
    assert net["server"].call(send_bytes, "site-2", protocol.MAX_REQUEST_BYTES) == "open"
    assert net["site_2"].call(last_length, protocol.MAX_REQUEST_BYTES) == protocol.MAX_REQUEST_BYTES
    assert net["server"].call(send_bytes, "site-2", 4 * MIB) == "closed"
    assert protocol.MAX_REQUEST_BYTES + MAX_HEADERS <= 4 * MIB


def make_payload(state, kind):
    import torch

    if kind == "one large tensor":
        state.kept["model"] = {"w": torch.ones(6 * MIB)}
    else:
        state.kept["model"] = {f"{'layer.' * 160}{i}": torch.ones(1) for i in range(5000)}


def send_payload(state, target, **kwargs):
    return scenes.send_value(state, target, state.kept["model"], **kwargs)


def nbytes_to_send(state):
    return sum(value.nbytes for value in state.kept.pop("model").values())


def nbytes_of_payload(state):
    return sum(value.nbytes for value in state.payloads[-1]["model"].values())


def read_reference(state):
    (reference,) = state.payloads[-1]["model"].values()
    return reference.materialize(state.cell).nbytes


def listen(state):
    lengths = state.kept["lengths"] = []
    state.cell.core_cell.register_request_cb(CHANNEL, "bytes", lambda message: lengths.append(len(message.payload)))


def last_length(state, expected):
    deadline = time.monotonic() + 60
    while expected not in state.kept["lengths"] and time.monotonic() < deadline:
        time.sleep(0.01)
    return state.kept["lengths"][-1]


def send_bytes(state, target, nbytes):
    """Send one message, and wait until the connection is closed, or its answer to a ping shows that it is not."""
    from nvflare.fuel.f3.message import Message

    from nvflare_lazy.transport import _nvflare_private

    core = state.cell.core_cell
    websocket = _nvflare_private.connection_to(core, target).websocket
    assert not core.fire_and_forget(CHANNEL, "bytes", target, Message({}, bytes(nbytes)))[target]
    deadline = time.monotonic() + (60 if nbytes >= 4 * MIB else 0.5)
    while not websocket.closed and time.monotonic() < deadline:
        time.sleep(0.01)
    return "closed" if websocket.closed else "open"
