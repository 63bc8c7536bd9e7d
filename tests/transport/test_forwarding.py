# SPDX-License-Identifier: Apache-2.0
"""Forwarding hops: references pass any number of them, and only the ends have the tensors."""

from __future__ import annotations

import pytest

from tests.transport import scenes
from tests.transport.peers import Net

MIB = 1 << 20


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    scratch = str(tmp_path_factory.mktemp("scratch"))
    with Net(scratch, server=True, site_1=True, site_2=True, site_3=False) as net:
        yield net


@pytest.fixture(autouse=True)
def nothing_left(net):
    yield
    for peer in net.peers.values():
        peer.call(scenes.forget)


def send(net, sender, to, backend="torch", kind="ten", **kwargs):
    assert net[sender].call(scenes.send, net[to].fqcn, backend, kind, **kwargs) == "ok"


def forward(net, hop, to, **kwargs):
    assert net[hop].call(scenes.forward, net[to].fqcn, **kwargs) == "ok"


@pytest.mark.parametrize("backend", ["torch", "numpy"])
@pytest.mark.parametrize(("origin", "end"), [("server", "site_2"), ("site_2", "server")], ids=["task", "result"])
def test_one_hop(net, backend, origin, end):
    """Tensors and arrays pass a hop as references, in both directions."""
    send(net, origin, "site_1", backend, "odd", pass_through=True)
    assert net["site_1"].call(scenes.kinds_received) == {"LazyDownloadRef"}
    forward(net, "site_1", end)
    assert net[end].call(scenes.compare, backend, "odd", False) == []


def test_two_hops(net):
    """References pass several hops, and keep their metadata all the way."""
    send(net, "server", "site_1", pass_through=True)
    forward(net, "site_1", "site_2", pass_through=True)
    assert net["site_2"].call(scenes.described) == net["server"].call(scenes.description, "ten")
    forward(net, "site_2", "server")
    assert net["server"].call(scenes.compare, "torch", "ten", False) == []


@pytest.mark.parametrize(
    ("origin", "hop", "end"),
    [
        ("server", "site_1", "site_3"),
        ("site_3", "site_1", "server"),
        ("server", "site_3", "site_1"),
        ("site_3", "server", "site_2"),
    ],
    ids=["stock end", "stock origin", "stock hop", "stock origin, plugin server as hop"],
)
def test_stock_among_them(net, origin, hop, end):
    """A stock peer may be at any place."""
    send(net, origin, hop, pass_through=True)
    forward(net, hop, end)
    assert net[end].call(scenes.compare, "torch", "ten", False) == []


def test_several_payloads(net):
    """A message may mix references to several payloads with its own tensors."""
    send(net, "server", "site_1", kind="ten", pass_through=True)
    send(net, "site_2", "site_1", kind="odd", pass_through=True)
    assert net["site_1"].call(scenes.forward_mix, net["server"].fqcn) == "ok"
    assert net["server"].call(scenes.compare_mix) == []


def test_several_payloads_to_stock(net):
    """A stock receiver cannot read such a message, and raises an error; it gets no wrong tensors."""
    send(net, "server", "site_1", kind="ten", pass_through=True)
    send(net, "site_2", "site_1", kind="odd", pass_through=True)
    assert net["site_1"].call(scenes.forward_mix, net["site_3"].fqcn, 3.0) != "ok"
    assert net["site_3"].call(scenes.kinds_received) == set()


@pytest.mark.parametrize("origin", ["server", "site_3"], ids=["plugin", "stock"])
def test_read_one(net, origin):
    """A hop that has to look at one tensor reads that one, and leaves the others where they are."""
    send(net, origin, "site_1", kind="ten", pass_through=True)
    same, grown = net["site_1"].call(scenes.read_one, "ten", "layer.3")
    assert same
    assert grown < 20 * MIB
    forward(net, "site_1", "site_2")
    assert net["site_2"].call(scenes.compare, "torch", "ten", False) == []


@pytest.mark.parametrize("backend", ["torch", "numpy"])
@pytest.mark.parametrize("to_disk", [False, True], ids=["to memory", "to disk"])
def test_recognised_by_nvflare(net, backend, to_disk):
    """NVFlare's own code finds our references in a message and replaces them by ordinary values, which it may change.

    Filters in front of external trainers require memory, so NVFlare requests it here, even where other data goes to
    disk.
    """
    send(net, "server", "site_1", backend, kind="odd", pass_through=True)
    net["site_1"].call(scenes.offload, to_disk)
    assert net["site_1"].call(scenes.materialize_by_nvflare)
    assert net["site_1"].call(scenes.compare, backend, "odd", False) == []
    net["site_1"].call(scenes.change_in_place)
    net["site_1"].call(scenes.offload, False)


def test_pickled_references(net):
    """A reference in another process is the same one; it is read and sent on there as here."""
    send(net, "server", "site_1", "torch", kind="odd", pass_through=True)
    net["site_1"].call(scenes.pickle_references)
    forward(net, "site_1", "site_2")
    assert net["site_2"].call(scenes.compare, "torch", "odd", False) == []


def test_hop_memory(net):
    """A gigabyte over a hop leaves no trace in the hop's memory."""
    net["server"].call(scenes.make_model, 1024, 64)
    net["site_2"].call(scenes.offload, True)
    send(net, "server", "site_1", kind="odd", pass_through=True)
    forward(net, "site_1", "site_2")
    net["site_1"].call(scenes.forget)
    net["site_1"].call(scenes.watch)
    assert net["server"].call(scenes.send_model, "site-1", pass_through=True) == "ok"
    forward(net, "site_1", "site_2")
    assert net["site_1"].call(scenes.grown) <= 16 * MIB
    assert net["site_2"].call(scenes.nbytes_received) == 1024 * MIB
    net["site_2"].call(scenes.offload, False)


def test_lost_result(net):
    """An unavailable result reaches the server as tensors that raise an error when read; the server keeps running."""
    trainer = net.add("site_9", True)
    trainer.wait_until_up()
    net["server"].call(scenes.limit_request_time, 2.0)
    send(net, "site_9", "site_1", kind="ten", pass_through=True)
    net.peers.pop("site_9")
    trainer.kill()
    forward(net, "site_1", "server")
    assert net["server"].call(scenes.how_it_failed) == {"PeerLostError"}
    net["server"].call(scenes.forget)
    send(net, "site_2", "server", kind="odd")
    assert net["server"].call(scenes.compare, "torch", "odd", False) == []


@pytest.mark.parametrize("sender", ["site_2", "site_3"], ids=["plugin", "stock"])
def test_missing_items(net, sender):
    """A payload with fewer tensors than the message refers to: the ones that are missing say so when used."""
    net[sender].call(scenes.omit_last, True)
    send(net, sender, "server", kind="ten")
    net[sender].call(scenes.omit_last, False)
    outcomes = net["server"].call(scenes.how_it_failed)
    assert {outcome for outcome in outcomes if not outcome.startswith("nothing")} == {"ProtocolError"}
    assert net["server"].call(scenes.failure) == "ProtocolError"


RUBBISH = [
    7,
    {"type": "what"},
    {"type": "ref", "data": 7},
    {"type": "ref", "data": "T0@nowhere"},
    {"type": "native", "data": b"x"},
]


@pytest.mark.parametrize("content", RUBBISH, ids=str)
def test_malformed_placeholders(net, content):
    """Invalid data instead of a tensor does not end a server that decodes it: reading that tensor raises an error."""
    send(net, "site_2", "server", kind="one")
    assert net["site_2"].call(scenes.send_placeholder, "server", content) == "ok"
    assert net["server"].call(scenes.failure) is not None
    assert len(net["server"].call(scenes.how_it_failed)) == 1
    assert net["site_2"].call(scenes.send_placeholder, "site-1", content, 3.0) != "ok"
