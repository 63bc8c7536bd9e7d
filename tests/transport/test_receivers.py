# SPDX-License-Identifier: Apache-2.0
"""Receivers that do not read, or ask for ever: they hold little of the sender, and other receivers do not notice."""

from __future__ import annotations

import itertools
import time
from contextlib import contextmanager

import pytest

from tests.transport import bad_receivers, bad_senders, scenes
from tests.transport.bad_receivers import SilentReceiver
from tests.transport.peers import Net

MIB = 1 << 20
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    with Net(str(tmp_path_factory.mktemp("scratch")), server=True, site_1=True) as net:
        net["server"].call(bad_receivers.tune_malloc)
        yield net


def receive(net, mib):
    """Let the honest receiver download; return the time that it took."""
    ref_id = net["server"].call(bad_receivers.offer_lazily, mib)
    outcome = net["site_1"].call(bad_senders.receive, "server", ref_id)
    assert outcome["error"] is None, outcome
    assert outcome["sum"] == 0
    assert net["server"].call(bad_receivers.unproven, "site-1") == 0
    return outcome["seconds"]


@pytest.fixture
def silent(net):
    """Connect receivers that read nothing, and disconnect them at the end."""
    connected = []

    def connect(count, **kwargs):
        connected.extend(SilentReceiver(net.port, f"silent-{next(NUMBERS)}", **kwargs) for _ in range(count))
        return connected

    yield connect
    for receiver in connected:
        receiver.close()


@pytest.mark.slow
@pytest.mark.parametrize("receive_buffer", [4096, None], ids=["small buffers", "ordinary buffers"])
@pytest.mark.parametrize(("mib", "segments"), [(64, 16), (1024, 400)], ids=["64 MiB", "1 GiB"])
def test_receivers_that_do_not_read(net, silent, receive_buffer, mib, segments):
    """40 receivers that stop reading hold at most 64 MiB, and another one is served as if they were not there."""
    ref_id = net["server"].call(bad_receivers.offer_lazily, mib, 40)
    alone = receive(net, mib)
    net["server"].call(scenes.watch)
    for receiver in silent(40, receive_buffer=receive_buffer):
        for number in range(segments):
            receiver.request(ref_id, number * 2 * MIB, 2 * MIB)
    beside = receive(net, mib)
    assert net["server"].call(scenes.grown) <= 64 * MIB
    # Connections that took half of a segment are closed after 5 seconds, once. The rest is the machine.
    assert beside <= 15 + 5 * alone


@pytest.mark.parametrize("scheme", ["http", pytest.param("grpc", marks=pytest.mark.slow)])
def test_drivers_that_queue(tmp_path, scheme):
    """NVFlare's other drivers queue what a receiver does not read: the sender gives them little."""
    with Net(str(tmp_path / "scratch"), scheme=scheme, server=True, site_1=True) as net:
        receive(net, 8)
        ref_id = net["server"].call(bad_receivers.offer_lazily, 1000)
        net["site_1"].call(bad_receivers.stop_after_requests)
        net["server"].call(scenes.watch)
        net["site_1"].start(bad_senders.receive, "server", ref_id)
        seen, deadline = [-1, 0], time.monotonic() + 60
        while (not seen[-1] or seen[-1] != seen[-2]) and time.monotonic() < deadline:
            time.sleep(0.5)
            seen.append(net["server"].call(bad_receivers.bytes_sent, ref_id))
        assert net["server"].call(scenes.grown) <= 64 * MIB


@contextmanager
def watch(net, *names):
    """Sum up by how much the memory of some peers grows, into the last entry of the list."""
    grown = []
    for name in names:
        net[name].call(scenes.watch)
    yield grown
    grown.append(sum(net[name].call(scenes.grown) for name in names))


@pytest.mark.parametrize("scheme", ["http", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tcp", "grpc"))])
def test_behind_another_process(tmp_path, scheme):
    """A receiver that stops reading holds little memory of a process between it and the sender, which serves others."""
    with Net(str(tmp_path / "scratch"), scheme=scheme, server=True, site_1=True, site_2=True, site_3=True) as net:

        def honest(name):
            outcome = net[name].call(bad_senders.receive, "site-1", net["site_1"].call(bad_receivers.offer_lazily, 32))
            assert outcome["error"] is None, outcome

        with watch(net, "server", "site_1") as ordinary:
            honest("site_3")
        ref_id = net["site_1"].call(bad_receivers.offer_lazily, 1000)
        net["site_2"].call(bad_receivers.stop_after_requests)
        with watch(net, "server", "site_1") as attacked:
            net["site_2"].start(bad_senders.receive, "site-1", ref_id)
            seen, deadline = [-1, 0], time.monotonic() + 60
            while (not seen[-1] or seen[-1] != seen[-2]) and time.monotonic() < deadline:
                time.sleep(0.5)
                seen.append(net["site_1"].call(bad_receivers.bytes_sent, ref_id))
            honest("site_3")
        assert attacked[0] <= ordinary[0] + 64 * MIB


def test_payload_is_not_pinned(net, silent):
    """Requests that bring no expected receiver forward do not keep a payload; a slow download does."""
    (receiver,) = silent(1)
    offered = {
        name: net["server"].call(bad_receivers.offer_lazily, 64, timeout=3.0, receiver_ids=receivers)
        for name, receivers in {
            "a byte": None,
            "the same": None,
            "unexpected": ["site-1"],
            "first requests": None,
            "slow": [receiver.name],
        }.items()
    }
    net["site_1"].start(bad_receivers.ask_in_vain, offered["first requests"])
    here, number, deadline = set(offered), 0, time.monotonic() + 50
    while here != {"slow"} and number < 60 and time.monotonic() < deadline:
        receiver.request(offered["a byte"], number, 1)
        receiver.request(offered["the same"], 0, 1000)
        receiver.request(offered["unexpected"], number * 1000, 1000)
        receiver.request(offered["slow"], number * 100_000, 100_000)
        for _ in range(4):
            receiver.read_frame()
        number += 1
        here = {name for name in here if net["server"].call(bad_receivers.is_offered, offered[name])}
        time.sleep(0.3)
    assert here == {"slow"}
    assert net["site_1"].result() < 600


@pytest.mark.parametrize(("origin", "number"), [("another", "1" * 32), ("site-1", "0" * 32)])
def test_forged_data(net, silent, origin, number):
    """Data for a download is taken only with the name of its sender and the download's number."""
    net["server"].call(bad_receivers.use_number, "1" * 32)
    ref_id = net["site_1"].call(bad_senders.offer, 16, "is slow")
    (forger,) = silent(1)
    net["server"].start(bad_senders.receive, "site-1", ref_id)
    for _ in range(3):
        for start in range(0, 16 * MIB, 2 * MIB):
            forger.send_data(number, start, b"\xff" * (2 * MIB), origin)
    outcome = net["server"].result()
    net["server"].call(bad_receivers.use_number, None)
    assert outcome["error"] is None, outcome
    assert outcome["sum"] == (0 + 1 + 2 + 3) * MIB
