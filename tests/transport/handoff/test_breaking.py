# SPDX-License-Identifier: Apache-2.0
"""Handoffs between real cells when a process is killed, a disk is full, or a file contains more than the payload."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from tests.transport import bad_senders, scenes
from tests.transport.handoff.test_cells import any_size, seen, watch_data
from tests.transport.peers import Net

SECRET = b"these bytes were removed by a filter. "
MIB = 1 << 20


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("scratch"))
    with Net(root, handoff=True, server=True, site_1=True, site_2=True, site_3=True) as net:
        for name in ("server", "site_1", "site_2", "site_3"):
            prepare(net, name)
        yield net


def prepare(net, name):
    net[name].call(any_size)
    net[name].call(watch_data)
    net[name].call(scenes.offload, True)


@pytest.fixture(autouse=True)
def nothing_is_left(net):
    yield
    for peer in net.peers.values():
        peer.start(forget)
    for peer in net.peers.values():
        peer.result()
    wait_for(lambda: not scenes.files_under(net.scratch_root))
    wait_for(lambda: not any(peer.call(used) for peer in net.peers.values()))


def forget(state):
    """Drop the received payload, without a collection of garbage in each of the processes: none may be necessary."""
    state.payloads.clear()
    state.kept.clear()
    seen(state)


def used(state):
    from nvflare_lazy.transport import offload

    return offload.runtime.scratch.job().used


def make_secret(state):
    import torch

    secret = torch.frombuffer(bytearray(SECRET * 100), dtype=torch.uint8)
    state.kept["model"] = {"a": torch.arange(1000), "secret": secret, "z": torch.arange(2000.0)}


def send_without_secret(state, target, kind):
    model = state.payloads[-1]["model"]
    sent = {name: value for name, value in model.items() if name != "secret"}
    if kind == "part":
        sent["part"] = model["secret"][:5]
    return scenes.send_value(state, target, sent)


@pytest.mark.parametrize("kind", ["all", "part"])
def test_a_tensor_that_a_filter_removed_is_not_in_the_file(net, kind):
    """The receiver gets a copy without it, though the tensors were in one file."""
    net["site_1"].call(make_secret)
    assert net["site_1"].call(scenes.send_model, "server") == "ok"
    assert net["server"].call(send_without_secret, "site-2", kind) == "ok"
    assert net["site_2"].call(seen)[-1] == "by handoff"
    found = files_of(net["site_2"])
    assert found
    assert all(SECRET not in Path(path).read_bytes() for path in found)
    assert all(SECRET in Path(path).read_bytes() for path in files_of(net["server"]))


def files_of(peer):
    return peer.call(_files_of)


def _files_of(state):
    from nvflare_lazy.tensors.lazy_tensor import LazyTensor

    return sorted(
        {
            value.source.file_range()[0].path
            for value in state.payloads[-1]["model"].values()
            if isinstance(value, LazyTensor)
        }
    )


def open_checkpoint(state, path):
    import nvflare_lazy

    state.kept["model"] = dict(nvflare_lazy.open(path).items())


def test_a_checkpoint_of_the_user_is_copied(net, tmp_path):
    """It may be edited, so that it is never linked, and its mode stays."""
    import torch
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(100_000.0)}, path)
    path.chmod(0o664)
    net["server"].call(open_checkpoint, str(path))
    assert net["server"].call(scenes.broadcast_model, ["site-1", "site-2"]) == {"ok"}
    for name in ("site_1", "site_2"):
        assert net[name].call(seen)[-1] == "by handoff"
    inodes = {os.stat(file).st_ino for name in ("site_1", "site_2") for file in files_of(net[name])}
    assert len(inodes) == 1
    assert path.stat().st_ino not in inodes
    assert (path.stat().st_nlink, path.stat().st_mode & 0o777) == (1, 0o664)


def fill_quota(state, left):
    """Give scratch a limit that leaves this much, or none."""
    from nvflare_lazy.transport import offload

    quota = offload.runtime.scratch.job()._quota
    quota.limit = None if left is None else quota.used + left


def fill_disk(state, full):
    """Simulate a full disk for data that is written in pieces."""
    import errno

    from nvflare_lazy.scratch import file

    class FullDisk:
        def __getattr__(self, name):
            return getattr(os, name)

        def pwrite(self, fd, data, offset):
            if offset >= 2 * MIB:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return os.pwrite(fd, data, offset)

    file.os = FullDisk() if full else os


@pytest.mark.parametrize(("cause", "on", "off"), [(fill_quota, 3 * MIB, None), (fill_disk, True, False)])
def test_a_sender_without_room_sends_segments(net, cause, on, off):
    """A quota or a full disk of the sender costs the handoff and nothing else; what it wrote is removed."""
    net["site_1"].call(scenes.make_model, 8, 3)
    net["site_1"].call(cause, on)
    assert net["site_1"].call(scenes.send_model, "server") == "ok"
    assert net["server"].call(seen) == ["data", "in segments"]
    assert net["server"].call(scenes.is_as_made, 8, 3)
    assert net["site_1"].call(used) == 0
    net["site_1"].call(cause, off)
    assert net["site_1"].call(scenes.send_model, "server") == "ok"
    assert net["server"].call(seen) == ["by handoff"]


def test_a_receiver_without_quota(net):
    """The payload fails as it would in segments, and nothing is counted twice."""
    net["site_1"].call(scenes.make_model, 8, 3)
    net["server"].call(fill_quota, 3 * MIB)
    net["site_1"].call(scenes.send_model, "server")
    assert net["server"].call(scenes.how_it_failed) == {"QuotaExceededError"}
    net["server"].call(forget)
    assert net["server"].call(used) == 0
    # Enough for it once: a handoff that counted the failed one as well would not fit.
    net["server"].call(fill_quota, 9 * MIB)
    assert net["site_1"].call(scenes.send_model, "server") == "ok"
    assert net["server"].call(scenes.is_as_made, 8, 3)
    net["server"].call(fill_quota, None)


def count_writes(state):
    """Begin to count the bytes that are written to scratch; return those since the last call."""
    from nvflare_lazy.transport._received_files import PreallocatedShards

    if "write" not in state.kept:
        write = PreallocatedShards.write

        def counted(self, offset, data):
            state.kept["written"] += len(data)
            write(self, offset, data)

        state.kept["write"], PreallocatedShards.write = write, counted
    written, state.kept["written"] = state.kept.get("written", 0), 0
    return written


def test_three_receivers_share_one_copy(net):
    """A later receiver gets the same file, even while it is being written."""
    net["server"].call(scenes.make_model, 32, 4)
    net["server"].call(scenes.slow_down, 0.03)
    names = ["site_1", "site_2", "site_3"]
    assert net["server"].call(scenes.broadcast_model, [net[name].fqcn for name in names]) == {"ok"}
    net["server"].call(scenes.slow_down, 0)
    for name in names:
        assert net[name].call(seen)[-1] == "by handoff"
        assert net[name].call(scenes.is_as_made, 32, 4)
    assert len({os.stat(path).st_ino for name in names for path in files_of(net[name])}) == 1


def test_a_copy_is_written_over_the_previous_one(net):
    """A client writes each result to the pages of the last one, if the server has given that up."""
    net["site_1"].call(scenes.make_model, 8, 3)
    inodes = []
    for keeps in (False, True, False):
        assert net["site_1"].call(scenes.send_model, "server") == "ok"
        inodes.append([os.stat(path).st_ino for path in files_of(net["server"])])
        if not keeps:
            net["server"].call(forget)
    assert inodes[0] == inodes[1] != inodes[2]


@pytest.mark.slow  # waits until the sender gives the receiver up
def test_a_killed_receiver(net):
    """The others receive what the sender is writing at that moment."""
    with extra_site(net) as victim:
        net["server"].call(scenes.make_model, 32, 4)
        net["server"].call(scenes.slow_down, 0.2)
        ref_id = net["server"].call(offer_model, 5.0)
        victim.start(bad_senders.receive, "server", ref_id)
        wait_for(lambda: safetensors_of(net))
        net["site_1"].start(bad_senders.receive, "server", ref_id)
    outcome = net["site_1"].result()
    assert outcome["error"] is None, outcome
    assert net["site_1"].call(seen)[-1] == "by handoff"
    net["server"].call(scenes.slow_down, 0)


@pytest.mark.slow  # waits until the receiver gives the sender up
@pytest.mark.parametrize("at", [0.1, 0.9])
def test_a_killed_sender(net, at):
    """It costs the transfer and nothing else; the written files are removed."""
    with extra_site(net) as victim:
        ref_id = victim.call(bad_senders.offer, 64, "dies", at)
        outcome = net["server"].call(bad_senders.receive, "site-8", ref_id, timeout=3.0)
    assert outcome["error"] == "PeerLostError", outcome
    assert (outcome["used"], outcome["left"], outcome["job left"]) == (0, [], False)


def test_an_abort_in_the_middle_of_a_spill(net):
    """The receiver stops waiting at once, and the sender stops writing."""
    ref_id = net["site_1"].call(bad_senders.offer, 64, "is slow")
    outcome = net["server"].call(bad_senders.receive, "site-1", ref_id, abort_after=0.3)
    assert outcome["error"] == "TransferAbortedError", outcome
    assert outcome["seconds"] < 30
    assert (outcome["used"], outcome["left"], outcome["job left"]) == (0, [], False)
    assert net["server"].call(seen) == []


def test_a_sender_that_cannot_read_its_tensors(net):
    """The handoff fails, then the segments, with the error of the sender."""
    ref_id = net["site_1"].call(bad_senders.offer, 16, "fails", 0.5)
    outcome = net["server"].call(bad_senders.receive, "site-1", ref_id)
    assert outcome["error"] == "PeerLostError", outcome
    assert "the disk of the sender has died" in outcome["text"]
    assert (outcome["used"], outcome["left"]) == (0, [])


def offer_model(state, timeout):
    from nvflare.fuel.f3.streaming.obj_downloader import ObjectDownloader

    from nvflare_lazy.transport.tensor_downloader import TensorDownloadable

    downloader = ObjectDownloader(cell=state.cell, timeout=timeout, num_receivers=2)
    return downloader.add_object(TensorDownloadable(state.kept["model"], 2 * MIB, cell=state.cell))


def safetensors_of(net):
    return [path for path in scenes.files_under(net.scratch_root) if path.endswith(".safetensors")]


@contextlib.contextmanager
def extra_site(net):
    """A site that is killed at the end."""
    peer = net.add("site_8", True)
    prepare(net, "site_8")
    try:
        yield peer
    finally:
        net.peers.pop("site_8").close()


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return result
