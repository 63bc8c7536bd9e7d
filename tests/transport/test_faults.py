# SPDX-License-Identifier: Apache-2.0
"""Whatever one sender does, or stops doing: a named error, nothing left behind, and the next transfer works."""

from __future__ import annotations

import json
import os
import subprocess
import time

import pytest

from nvflare_lazy.transport.limits import PayloadLimits
from nvflare_lazy.transport.segments.protocol import SEGMENT_BYTES
from tests.transport import bad_senders, scenes
from tests.transport.peers import Net


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    with Net(str(tmp_path_factory.mktemp("scratch")), server=True, site_1=True) as net:
        yield net


@pytest.fixture(params=[True, False], ids=["to disk", "to memory"])
def to_disk(request):
    return request.param


def assert_failed(outcome, error, text=""):
    assert outcome["error"] == error, outcome
    assert text in outcome["text"]
    assert outcome["left"] == []
    assert outcome["recycled"] == 0
    assert not outcome["job left"]
    assert outcome["used"] == 0
    assert outcome["budget"] == 0


@pytest.fixture(autouse=True)
def next_one_works(net):
    """Whatever a test does to the receiver: the next transfer works."""
    yield
    assert_works(net)


def assert_works(net, sender="site_1"):
    ref_id = net[sender].call(bad_senders.offer)
    outcome = net["server"].call(bad_senders.receive, net[sender].fqcn, ref_id)
    assert outcome["error"] is None, outcome
    assert outcome["sum"] == (0 + 1 + 2 + 3) * (1 << 20)
    assert outcome["left"] == []
    assert not outcome["job left"]


@pytest.mark.parametrize(
    ("at", "to_disk"),
    [(0.1, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0.99, True), (0.5, False)))],
)
def test_sender_dies(net, at, to_disk):
    """A sender that is killed on the way costs its transfer and nothing else."""
    victim = net.add("site_9", True)
    try:
        ref_id = victim.call(bad_senders.offer, 64, "dies", at)
        outcome = net["server"].call(bad_senders.receive, "site-9", ref_id, to_disk=to_disk, timeout=3.0)
    finally:
        victim.close()
    assert_failed(outcome, "PeerLostError", "site-9")
    assert outcome["seconds"] < 60


def test_sender_stalls(net, to_disk):
    """A sender that stays connected but stops sending is given up after the time limit."""
    victim = net.add("site_8", True)
    try:
        ref_id = victim.call(bad_senders.offer, 64, "stalls", 0.5)
        outcome = net["server"].call(bad_senders.receive, "site-8", ref_id, to_disk=to_disk, timeout=1.0)
    finally:
        victim.close()
    assert_failed(outcome, "PeerLostError", "sent nothing for")


def test_abort(net, to_disk):
    """An abort signal ends a transfer at once."""
    ref_id = net["site_1"].call(bad_senders.offer, 64, "is slow")
    outcome = net["server"].call(bad_senders.receive, "site-1", ref_id, to_disk=to_disk, abort_after=0.3)
    assert_failed(outcome, "TransferAbortedError", "enough")
    assert outcome["seconds"] < 30


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("cuts short", "ProtocolError", f"{SEGMENT_BYTES - 1} bytes, but {SEGMENT_BYTES}"),
        ("sends too much", "ProtocolError", f"{SEGMENT_BYTES + 1} bytes, but {SEGMENT_BYTES}"),
        ("fails", "PeerLostError", "the disk of the sender has died"),
    ],
)
def test_bad_segments(net, fault, error, text, to_disk):
    """Segments of the wrong length, and a sender that cannot read its tensors."""
    ref_id = net["site_1"].call(bad_senders.offer, 16, fault, 0.5)
    assert_failed(net["server"].call(bad_senders.receive, "site-1", ref_id, to_disk=to_disk), error, text)


@pytest.mark.parametrize(
    "lie",
    [
        "overlap",
        "overflow",
        "hidden overflow",
        "wrong dtype",
        "wrong total",
        "too few",
        "too many",
        "same name",
        "negative",
        "no list",
        "rubbish",
        "a million names",
    ],
)
def test_lying_list(net, lie):
    """A list of tensors that cannot be true is refused before anything is set aside for it."""
    ref_id = net["site_1"].call(bad_senders.offer, 1, f"list: {lie}")
    outcome = net["server"].call(bad_senders.receive, "site-1", ref_id)
    assert_failed(outcome, "ProtocolError", "site-1")


def test_lost_messages(net):
    """Lost segments are requested again."""
    net["server"].call(bad_senders.be_impatient)
    net["site_1"].call(bad_senders.drop_answers, 5)
    try:
        assert_works(net)
    finally:
        net["site_1"].call(bad_senders.drop_answers, 0)


def test_segments_blocked(net, to_disk):
    """Where requests for segments are blocked, whole tensors are sent instead."""
    net["server"].call(bad_senders.be_impatient)
    ref_id = net["site_1"].call(bad_senders.offer)
    net["site_1"].call(bad_senders.drop_answers, 1)
    try:
        limits = PayloadLimits(20 << 20)  # it counts once
        outcome = net["server"].call(bad_senders.receive, "site-1", ref_id, to_disk=to_disk, limits=limits)
    finally:
        net["site_1"].call(bad_senders.drop_answers, 0)
    assert outcome["error"] is None, outcome
    assert outcome["sum"] == (0 + 1 + 2 + 3) * (1 << 20)
    assert outcome["budget"] == 0


def with_header(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


GOOD = bad_senders.item("T0", 1000)
BAD_ITEMS = {
    "truncated": [GOOD[:-1]],
    "no header": [b"abc"],
    "header of 2**63 bytes": [b"\xff" * 8 + GOOD],
    "surplus": [GOOD + b"x"],
    "not bytes": ["text"],
    "overlap": [
        with_header(
            {
                "a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
                "b": {"dtype": "U8", "shape": [8], "data_offsets": [4, 12]},
            },
            bytes(12),
        )
    ],
    "overflow": [with_header({"a": {"dtype": "F64", "shape": [1 << 62, 4], "data_offsets": [0, 8]}}, bytes(8))],
    "wrong dtype": [with_header({"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 8]}}, bytes(8))],
    "unknown dtype": [with_header({"a": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}}, bytes(8))],
    "a million names": [
        with_header({f"n{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(10**6)})
    ],
}


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_bad_items(net, name, to_disk):
    """Items of a sender without the plugin that are damaged, or lie about themselves."""
    ref_id = net["site_1"].call(bad_senders.offer_items, BAD_ITEMS[name])
    assert_failed(net["server"].call(bad_senders.receive, "site-1", ref_id, to_disk=to_disk), "ProtocolError")


def test_duplicate_item(net, to_disk):
    """The same item twice."""
    ref_id = net["site_1"].call(bad_senders.offer_items, [GOOD, GOOD])
    assert_failed(net["server"].call(bad_senders.receive, "site-1", ref_id, to_disk=to_disk), "ProtocolError")


def test_names_are_no_paths(net, tmp_path_factory):
    """A tensor's name may look like a path; nothing outside the scratch is touched, and it arrives."""
    name = "../../" * 9 + "tmp/nvflare_lazy_escaped"
    ref_id = net["site_1"].call(bad_senders.offer_items, [bad_senders.item(name, 1000)])
    outcome = net["server"].call(bad_senders.receive, "site-1", ref_id)
    assert outcome["error"] is None
    assert outcome["tensors"] == 1
    assert not os.path.lexists("/tmp/nvflare_lazy_escaped")


def test_never_ends(net):
    """A sender that offers a terabyte, and one that sends items for ever, meet the quota."""
    ref_id = net["site_1"].call(bad_senders.offer, 1, "never ends")
    outcome = net["server"].call(bad_senders.receive, "site-1", ref_id, quota=8 << 20)
    assert_failed(outcome, "QuotaExceededError")
    ref_id = net["site_1"].call(bad_senders.offer_items, [], endless="tensors")
    outcome = net["server"].call(bad_senders.receive, "site-1", ref_id, quota=8 << 20)
    assert_failed(outcome, "QuotaExceededError")


def test_offer_beyond_the_limit(net):
    """A terabyte is refused when it is offered, whatever the quota; nothing was reserved or requested for it."""
    ref_id = net["site_1"].call(bad_senders.offer, 1, "never ends")
    outcome = net["server"].call(bad_senders.receive, "site-1", ref_id, limits=PayloadLimits(nbytes=1 << 30))
    assert_failed(outcome, "ProtocolError", "site-1 sends 1.0 TiB of tensors in one message")
    assert "more than the limit of 1.0 GiB" in outcome["text"]
    assert "max_result_size" in outcome["text"]


@pytest.mark.parametrize(
    ("endless", "text"),
    [
        ("empty tensors", "301 tensors in one message, more than the limit of 300"),
        ("tensors", "more than the limit of 64.0 MiB"),
        ("the same", "T0"),
        ("nothing", "replies without an item"),
    ],
)
def test_endless_items(net, endless, text, to_disk):
    """Items without end from a sender without the package: bytes, names and empty replies are counted."""
    ref_id = net["site_1"].call(bad_senders.offer_items, [], endless=endless)
    limits = PayloadLimits(nbytes=64 << 20, tensors=300)
    outcome = net["server"].call(bad_senders.receive, "site-1", ref_id, to_disk=to_disk, limits=limits)
    assert_failed(outcome, "ProtocolError", text)


@pytest.mark.slow
@pytest.mark.parametrize("paused", ["site_1", "server"])
def test_pause(net, paused):
    """A transfer in which a process is paused for 40 s succeeds, also if that is longer than the receiver waits."""
    ref_id = net["site_1"].call(bad_senders.offer, 64, "is slow")
    net["server"].start(bad_senders.receive, "site-1", ref_id, timeout=35.0 if paused == "server" else 60.0)
    deadline = time.monotonic() + 60
    while not scenes.files_under(net.scratch_root) and time.monotonic() < deadline:
        time.sleep(0.05)
    net[paused].stop()
    time.sleep(40)
    net[paused].resume()
    outcome = net["server"].result()
    assert outcome["error"] is None, outcome
    assert outcome["seconds"] > 40


def test_disk_full(net, tmp_path):
    """A full disk, here a small tmpfs, is an error by that name, and nothing is left on it."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        ref_id = net["site_1"].call(bad_senders.offer, 64)
        outcome = net["server"].call(bad_senders.receive, "site-1", ref_id, root=str(tmp_path), min_free=0)
        assert_failed(outcome, "DiskFullError")
        items = [bad_senders.item(f"T{i}", 1 << 20) for i in range(12)]
        ref_id = net["site_1"].call(bad_senders.offer_items, items)
        outcome = net["server"].call(bad_senders.receive, "site-1", ref_id, root=str(tmp_path), min_free=0)
        assert_failed(outcome, "DiskFullError")
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_scratch_deleted(net):
    """A scratch directory that is deleted underneath is an error by that name."""
    ref_id = net["site_1"].call(bad_senders.offer, 64, "is slow")
    outcome = net["server"].call(bad_senders.receive, "site-1", ref_id, delete_after=0.2)
    assert_failed(outcome, "ScratchDeletedError")


def test_receiver_dies(net, tmp_path):
    """What a killed receiver leaves is reclaimed when it starts again; a living owner's scratch is not touched."""
    victim = net.add("site_7", True)
    victim.wait_until_up()
    ref_id = net["site_1"].call(bad_senders.offer, 64, "is slow")
    victim.start(bad_senders.receive, "site-1", ref_id)
    deadline = time.monotonic() + 60
    while not scenes.files_under(net.scratch_root) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert scenes.files_under(net.scratch_root) != []
    net["server"].start(
        bad_senders.receive, "site-1", net["site_1"].call(bad_senders.offer, 4), hold=str(tmp_path / "go")
    )
    victim.kill()
    again = net.add("site_7", True)
    try:
        assert len(again.call(bad_senders.leases_of)) == 2
    finally:
        again.close()
        (tmp_path / "go").touch()
        outcome = net["server"].result()
    assert outcome["error"] is None


def test_two_jobs(net):
    """Two jobs that receive at once under the same root do not meet."""
    other = net.add("site_6", True)
    try:
        mine = net["site_1"].call(bad_senders.offer, 64)
        theirs = net["site_1"].call(bad_senders.offer, 64)
        other.start(bad_senders.receive, "site-1", theirs)
        outcome = net["server"].call(bad_senders.receive, "site-1", mine)
        assert outcome["error"] is None
        assert other.result()["error"] is None
    finally:
        other.close()


def test_abort_cycles(net):
    """100 aborted downloads: after the second 50 there is no more memory, thread, descriptor or file than before."""
    refs = net["site_1"].call(bad_senders.offer_often, 8, 100)
    early, late = net["server"].call(bad_senders.abort_cycles, "site-1", refs)
    assert late["threads"] <= early["threads"] + 5
    assert late["files"] <= early["files"]
    assert late["objects"] <= early["objects"] + 75
    assert late["memory"] <= early["memory"] + (8 << 20)  # of some hundreds of MiB received
    assert net["server"].call(scenes.scratch_files) == []
