# SPDX-License-Identifier: Apache-2.0
"""Payloads by handoff between real cells: what arrives is what segments bring, and no byte of it passes a socket."""

from __future__ import annotations

import pytest

from nvflare_lazy.transport.handoff import wire
from tests.transport import scenes
from tests.transport.peers import Net

# In each peer.
SEEN: list[str] = []


def any_size(state):
    """Hand over payloads of any size."""
    wire.MIN_BYTES = 0


def watch_data(state):
    """Note what is requested in segments, and how payloads are received."""
    from nvflare_lazy.transport.receive import PayloadConsumer
    from nvflare_lazy.transport.segments.client import SegmentDownload

    run, complete = SegmentDownload.run, PayloadConsumer.download_completed

    def watched_run(self):
        SEEN.append(self._what)
        run(self)

    def watched_completion(self, ref_id):
        SEEN.append(self.way)
        complete(self, ref_id)

    SegmentDownload.run, PayloadConsumer.download_completed = watched_run, watched_completion


def seen(state):
    """Return what was noted since the last call."""
    noted = list(SEEN)
    SEEN.clear()
    return noted


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("scratch"))
    with Net(root, handoff=True, server=True, site_1=True, site_2=True, site_3=False) as net:
        for name in ("server", "site_1", "site_2"):
            net[name].call(any_size)
            net[name].call(watch_data)
        yield net


def exchange(net, sender, receiver, backend, kind, lazy):
    assert net[sender].call(scenes.send, net[receiver].fqcn, backend, kind) == "ok"
    return net[receiver].call(scenes.compare, backend, kind, lazy)


@pytest.mark.parametrize("kind", ["one", "ten", "many", "dtypes", "odd"])
@pytest.mark.parametrize("backend", ["torch", "numpy"])
@pytest.mark.parametrize("to_disk", [False, True], ids=["to memory", "to disk"])
def test_values(net, backend, kind, to_disk):
    """Tensors and arrays of all kinds arrive, on disk and in memory; only the list of them is sent."""
    net["server"].call(scenes.offload, to_disk)
    assert exchange(net, "site_1", "server", backend, kind, to_disk) == []
    assert net["server"].call(seen) == ["manifest", "by handoff"]
    # What was received is a file of this package, or memory: sent on, it arrives as well.
    net["server"].call(scenes.keep_received)
    assert net["server"].call(scenes.broadcast_model, ["site-2"]) == {"ok"}
    assert net["site_2"].call(scenes.compare, backend, kind, False) == []
    assert net["site_2"].call(seen) == ["manifest", "by handoff"]
    for name in ("server", "site_2"):
        net[name].call(scenes.forget)
    assert net["server"].call(scenes.scratch_files) == []
