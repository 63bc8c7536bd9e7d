# SPDX-License-Identifier: Apache-2.0
"""Payloads by handoff between real cells arrive as they do in segments, and no byte of them passes a socket."""

from __future__ import annotations

import gc
import itertools
import os
import time

import pytest

from nvflare_lazy.transport.handoff import wire
from tests.transport import bad_receivers, bad_senders, scenes
from tests.transport.peers import Net

# In each peer.
SEEN: list[str] = []


def any_size(state):
    """Hand over payloads of any size."""
    wire.MIN_BYTES = 0


def watch_data(state):
    """Note requests for segments of data, copies, and the ways in which payloads are received."""
    from nvflare_lazy.transport.handoff.copies import Copy
    from nvflare_lazy.transport.receive import PayloadConsumer
    from nvflare_lazy.transport.segments import protocol
    from nvflare_lazy.transport.segments.client import SegmentDownload

    run, complete, write = SegmentDownload.run, PayloadConsumer.download_completed, Copy.write

    def watched_run(self):
        if self._what != protocol.MANIFEST:
            SEEN.append(self._what)
        run(self)

    def watched_completion(self, ref_id):
        SEEN.append(self.way)
        complete(self, ref_id)

    def watched_write(self, *args):
        SEEN.append("copy")
        write(self, *args)

    SegmentDownload.run, PayloadConsumer.download_completed, Copy.write = watched_run, watched_completion, watched_write


def seen(state):
    """Return the notes since the last call."""
    noted = list(SEEN)
    SEEN.clear()
    return noted


def hold_writes(state, gate):
    """Let writes of tensors to scratch wait while a file exists, and note the replies to receivers."""
    from nvflare_lazy.scratch.file import ScratchFile
    from nvflare_lazy.transport.handoff.server import HandoffServer

    pwrite, answer = ScratchFile.pwrite, HandoffServer.answer

    def held(self, buffer, offset):
        while offset and os.path.exists(gate):
            time.sleep(0.01)
        return pwrite(self, buffer, offset)

    def noted(self, ref_id, proof, receiver, runtime):
        fields = answer(self, ref_id, proof, receiver, runtime)
        SEEN.append(f"{receiver}: {fields['files']}" if fields["files"] == "wait" else receiver)
        return fields

    ScratchFile.pwrite, HandoffServer.answer = held, noted


def make(state, kind):
    """Keep a payload to send."""
    state.kept["model"] = scenes.tensors(kind)


def end_transactions(state):
    """End all transactions, as the end of a job does."""
    from nvflare.fuel.f3.streaming.download_service import DownloadService

    for transaction in list(DownloadService._tx_table):
        DownloadService.delete_transaction(transaction)


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("scratch"))
    with Net(root, handoff=True, server=True, site_1=True, site_2=True, site_3=False) as net:
        net.handoff = False  # as a release without it
        net.add("site_4", True).wait_until_up()
        for name in ("server", "site_1", "site_2"):
            net[name].call(any_size)
            net[name].call(watch_data)
        yield net


def exchange(net, sender, receiver, backend, kind, lazy=False):
    assert net[sender].call(scenes.send, net[receiver].fqcn, backend, kind) == "ok"
    return net[receiver].call(scenes.compare, backend, kind, lazy)


def forget(net, *names):
    for name in names:
        net[name].call(scenes.forget)
        net[name].call(seen)


@pytest.mark.parametrize(
    ("backend", "kind", "to_disk"),
    [("torch", "many", True), *itertools.product(("torch", "numpy"), ("dtypes", "odd"), (False, True))],
)
def test_values(net, backend, kind, to_disk):
    """Tensors and arrays of all kinds arrive, on disk and in memory; only the list of them is sent."""
    net["server"].call(scenes.offload, to_disk)
    assert exchange(net, "site_1", "server", backend, kind, to_disk) == []
    assert net["server"].call(seen) == ["by handoff"]
    # Sent on, it arrives as well: a received file as it is.
    net["server"].call(scenes.keep_received)
    assert net["server"].call(scenes.broadcast_model, ["site-2"]) == {"ok"}
    assert net["site_2"].call(scenes.compare, backend, kind, False) == []
    assert net["site_2"].call(seen) == ["by handoff"]
    assert net["server"].call(seen) == ([] if to_disk else ["copy"])
    forget(net, "server", "site_1", "site_2")
    assert net["server"].call(scenes.scratch_files) == []


@pytest.mark.parametrize(("peer", "way"), [("site_3", "as whole tensors"), ("site_4", "in segments")])
def test_peers_without_handoff(net, peer, way):
    """Peers without the package, and peers with a release without handoffs, send and receive as before."""
    net["server"].call(scenes.offload, True)
    assert exchange(net, peer, "server", "torch", "ten", True) == []
    assert way in net["server"].call(seen)
    assert exchange(net, "server", peer, "torch", "ten") == []
    assert net["server"].call(seen) == []
    forget(net, "server", peer)


def send_in_thread(state, targets):
    """Broadcast the kept model, in a thread."""
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(1)
    state.kept["sent"] = pool.submit(scenes.broadcast_model, state, targets)
    pool.shutdown(wait=False)


def sent(state):
    """Wait for the broadcast, and return the codes of the replies."""
    codes = state.kept.pop("sent").result()
    state.kept.clear()
    gc.collect()
    return codes


def wait_for(net, name, *texts):
    """Wait until all of these were noted."""
    noted, deadline = [], time.monotonic() + 120
    while not set(texts) <= set(noted):
        assert time.monotonic() < deadline, noted
        time.sleep(0.02)
        noted += net[name].call(seen)


def test_slow_disk_of_the_sender(net, tmp_path):
    """While the sender writes, other messages pass, receivers wait, and one copy is for all; an end leaves nothing."""
    gate = tmp_path / "gate"
    gate.touch()
    net["site_1"].call(hold_writes, str(gate))
    for name in ("server", "site_2"):
        net[name].call(scenes.offload, True)
    for ends in (False, True):
        net["site_1"].call(make, "ten")
        net["site_1"].call(send_in_thread, ["server", "site-2"])
        wait_for(net, "site_1", "copy", "server: wait", "site-2: wait")
        assert exchange(net, "site_3", "site_1", "torch", "one") == []
        if ends:
            net["site_1"].call(end_transactions)
        gate.unlink()
        codes = net["site_1"].call(sent)
        if ends:
            assert codes != {"ok"}
        else:
            assert codes == {"ok"}
            assert net["site_1"].call(seen).count("copy") == 0
            for name in ("server", "site_2"):
                assert net[name].call(scenes.compare, "torch", "ten", True) == []
                assert net[name].call(seen) == ["by handoff"]
            gate.touch()
        forget(net, "server", "site_1", "site_2")
    assert net["server"].call(scenes.scratch_files) == []


def trickle(state, seconds):
    """Let each write of a piece to scratch take so long."""
    from nvflare_lazy.scratch.file import ScratchFile

    pwrite = ScratchFile.pwrite

    def slow(self, buffer, offset):
        if offset:
            time.sleep(seconds)
        return pwrite(self, buffer, offset)

    ScratchFile.pwrite = slow


@pytest.mark.slow
def test_sender_is_slower_than_the_timeout(net):
    """Waiting for a sender that writes keeps the payload available; the totals of NVFlare equal the payload."""
    net["site_2"].call(trickle, 1.0)
    net["server"].call(scenes.offload, True)
    ref_id = net["site_2"].call(bad_receivers.offer_lazily, 40, timeout=3.0)
    started = time.monotonic()
    outcome = net["server"].call(bad_senders.receive, "site-2", ref_id)
    assert time.monotonic() - started > 9
    assert outcome["error"] is None, outcome
    assert "by handoff" in net["server"].call(seen)
