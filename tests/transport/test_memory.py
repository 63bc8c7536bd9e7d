# SPDX-License-Identifier: Apache-2.0
"""What a transfer takes in memory, measured in the processes that send and receive."""

from __future__ import annotations

import pytest

from nvflare_lazy.transport.limits import PayloadLimits, PayloadSize
from tests.transport import bad_senders, scenes
from tests.transport.peers import Net

MIB = 1 << 20


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    scratch = str(tmp_path_factory.mktemp("scratch"))
    with Net(scratch, server=True, site_1=True, site_2=True, site_3=True, site_4=False) as net:
        for name in ("site_1", "site_2", "site_3"):
            net[name].call(scenes.offload, True)
            assert net["server"].call(scenes.send, net[name].fqcn, "torch", "odd") == "ok"
        yield net


@pytest.fixture(autouse=True)
def nothing_left(net):
    yield
    for peer in net.peers.values():
        peer.call(scenes.forget)


@pytest.mark.parametrize("mib", [512, pytest.param(2048, marks=pytest.mark.slow)])
def test_one_huge_tensor(net, mib):
    """A tensor, even of 2**31 bytes, takes 64 MiB at most at the receiver, and at the sender beyond itself."""
    net["server"].call(scenes.make_model, mib, 1)
    for name in ("server", "site_1"):
        net[name].call(scenes.watch)
    assert net["server"].call(scenes.send_model, "site-1") == "ok"
    assert net["site_1"].call(scenes.grown) <= 64 * MIB
    assert net["server"].call(scenes.grown) <= 64 * MIB
    assert net["site_1"].call(scenes.is_as_made, mib, 1)


def test_slow_disk(net):
    """However slow the disk is, no more than a few segments wait in memory to be written."""
    net["server"].call(scenes.make_model, 256, 1)
    net["site_1"].call(scenes.slow_down, 0.1)
    net["site_1"].call(scenes.watch)
    assert net["server"].call(scenes.send_model, "site-1") == "ok"
    grown = net["site_1"].call(scenes.grown)
    net["site_1"].call(scenes.slow_down, 0.0)
    assert grown <= 32 * MIB
    assert net["site_1"].call(scenes.is_as_made, 256, 1)


def test_nothing_to_wait_for(net):
    """A sender has no thread left that a process would have to wait for at its end."""
    assert net["server"].call(scenes.threads_to_wait_for) == []


def test_lazy_tensor_sent_on(net):
    """A sender that holds the tensor lazily serves it from its file: next to nothing in memory."""
    net["server"].call(scenes.make_model, 256, 1)
    assert net["server"].call(scenes.send_model, "site-1") == "ok"
    net["server"].call(scenes.forget)
    net["site_1"].call(scenes.keep_received)
    for name in ("site_1", "site_2"):
        net[name].call(scenes.watch)
    assert net["site_1"].call(scenes.send_model, "site-2") == "ok"
    assert net["site_1"].call(scenes.grown) <= 32 * MIB
    assert net["site_2"].call(scenes.grown) <= 64 * MIB
    assert net["site_2"].call(scenes.is_as_made, 256, 1)


def test_into_memory(net):
    """Received into memory, a tensor takes its own size and little more: nothing is joined."""
    net["site_1"].call(scenes.offload, False)
    net["server"].call(scenes.make_model, 512, 4)
    net["site_1"].call(scenes.watch)
    assert net["server"].call(scenes.send_model, "site-1") == "ok"
    assert net["site_1"].call(scenes.grown) <= (512 + 64) * MIB
    assert net["site_1"].call(scenes.is_as_made, 512, 4)
    net["site_1"].call(scenes.offload, True)


def test_broadcast_with_a_slow_receiver(net):
    """Four receivers, one slow and one stock: all get the model, and the sender keeps nothing for them."""
    net["server"].call(scenes.make_model, 64, 64)
    net["site_2"].call(scenes.slow_down, 0.02)
    net["server"].call(scenes.watch)
    targets = ["site-1", "site-2", "site-3", "site-4"]
    assert net["server"].call(scenes.broadcast_model, targets) == {"ok"}
    assert net["server"].call(scenes.grown) <= 64 * MIB
    net["site_2"].call(scenes.slow_down, 0.0)
    for name in ("site_1", "site_2", "site_3", "site_4"):
        assert net[name].call(scenes.is_as_made, 64, 64)


def test_bytes_under_way(net):
    """However many senders send, the data in flight to a receiver stays within its one budget."""
    net["site_1"].call(scenes.limit_under_way, 4 * MIB)
    for name in ("server", "site_2", "site_3"):
        net[name].call(scenes.make_model, 64, 4)
    for name in ("server", "site_2", "site_3"):
        net[name].start(scenes.send_model, "site-1")
    assert [net[name].result() for name in ("server", "site_2", "site_3")] == ["ok"] * 3
    assert net["site_1"].call(scenes.max_in_flight) <= 4 * MIB
    assert net["site_1"].call(scenes.nbytes_received) == 64 * MIB
    net["site_1"].call(scenes.limit_under_way, 32 * MIB)


MODEL = PayloadSize(nbytes=64 * MIB, tensors=5000, name_bytes=150_000)
SITES = ("site_1", "site_2", "site_3")


def attack(net, make, *args, limits, timeout=3.0, **kwargs):
    """Let three clients send something at once; return what became of it, and the growth of the server's memory."""
    offers = [(net[name].fqcn, net[name].call(make, *args, **kwargs)) for name in SITES]
    return net["server"].call(bad_senders.receive_all, offers, limits=limits, timeout=timeout)


@pytest.mark.parametrize("stalls", [False, True], ids=["complete", "stalled"])
def test_lists_of_long_names(net, stalls):
    """Three clients send as many and as long names as a model of 5,000 tensors permits."""
    limits = PayloadLimits.for_model(MODEL)
    length = limits.name_bytes // limits.tensors
    outcomes, grown = attack(net, bad_senders.offer_names, limits.tensors, length, stalls=stalls, limits=limits)
    expected = (["PeerLostError"] if stalls else [None]) * 3
    assert [outcome["error"] for outcome in outcomes] == expected
    assert grown <= (32 + 64) * MIB


@pytest.mark.slow
def test_half_a_million_names_while_no_model_is_known(net):
    """Lists of tensors of the largest size that is accepted take turns; the tensors themselves take a kilobyte each."""
    outcomes, grown = attack(
        net, bad_senders.offer_names, 500_000, 64, stalls=True, limits=PayloadLimits(), timeout=90.0
    )
    assert {outcome["error"] for outcome in outcomes} == {"PeerLostError"}
    assert grown <= 3 * 500_000 * 400 + 400 * MIB
