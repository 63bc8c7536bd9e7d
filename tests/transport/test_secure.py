# SPDX-License-Identifier: Apache-2.0
"""Messages that are encrypted end to end: their tensors are also encrypted, and an eavesdropper cannot read them."""

from __future__ import annotations

import pytest

from tests.transport import eavesdropping, scenes
from tests.transport.peers import Net

SECRET = b"The weights nobody but the two of us shall see. "


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    keys = eavesdropping.credentials(tmp_path_factory.mktemp("keys"), ["server", "site_1", "site_2", "site_3"])
    scratch = str(tmp_path_factory.mktemp("scratch"))
    with Net(scratch, keys, server=True, site_1=True, site_2=True, site_3=False) as net:
        for name in ("site_1", "site_2", "site_3"):
            assert net["server"].call(scenes.send, net[name].fqcn, "torch", "one") == "ok"
        for peer in net.peers.values():
            peer.call(scenes.forget)
            peer.call(eavesdropping.listen)
        for name in ("server", "site_3"):
            net[name].call(eavesdropping.secret_model, SECRET)
        yield net


@pytest.mark.parametrize("to_disk", [False, True], ids=["to memory", "to disk"])
def test_secure(net, to_disk):
    """Segments of a secure message are encrypted; those of another are not, which shows that the test can tell."""
    net["site_1"].call(scenes.offload, to_disk)
    for secure in (True, False):
        assert net["server"].call(scenes.send_model, "site-1", secure=secure) == "ok"
        assert net["site_1"].call(eavesdropping.is_secret_model, SECRET)
        heard = net["site_1"].call(eavesdropping.heard, SECRET)
        assert heard["segments"] >= 6
        assert heard["receipts"] == heard["segments"]
        assert heard["in the clear"] == (0 if secure else heard["segments"])
        assert (heard["secrets"] == 0) == secure


@pytest.mark.parametrize(
    ("sender", "receiver"), [("server", "site_3"), ("site_3", "server")], ids=["to stock", "from stock"]
)
def test_secure_with_stock(net, sender, receiver):
    """So it is with whole tensors, to and from a peer without the plugin."""
    for secure in (True, False):
        assert net[sender].call(scenes.send_model, net[receiver].fqcn, secure=secure) == "ok"
        assert net[receiver].call(eavesdropping.is_secret_model, SECRET)
        assert (net[receiver].call(eavesdropping.heard, SECRET)["secrets"] == 0) == secure


@pytest.mark.parametrize("secure", [True, False])
def test_read_at_a_hop(net, secure):
    """A hop that reads one tensor of a message reads it encrypted if the message was."""
    assert net["server"].call(scenes.send_model, "site-2", pass_through=True, secure=secure) == "ok"
    net["site_2"].call(eavesdropping.heard, SECRET)
    assert net["site_2"].call(eavesdropping.read_one, SECRET)
    heard = net["site_2"].call(eavesdropping.heard, SECRET)
    assert heard["segments"] >= 2
    assert heard["in the clear"] == (0 if secure else heard["segments"])


def test_no_keys(net):
    """A receiver without keys cannot be sent a secure message, and gets no part of it in the clear either."""
    net.credentials["site_9"] = {}
    bare = net.add("site_9", True)
    try:
        bare.call(eavesdropping.listen)
        assert net["server"].call(scenes.send_model, "site-9", secure=True, timeout=3.0) != "ok"
        assert set(bare.call(eavesdropping.heard, SECRET).values()) == {0}
    finally:
        bare.close()
