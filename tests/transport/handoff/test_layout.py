# SPDX-License-Identifier: Apache-2.0
"""The files that contain a payload: files of this package as they are, and one copy of all else."""

from __future__ import annotations

import errno
import gc
import os
import threading

import pytest
import torch

import nvflare_lazy
from nvflare_lazy.scratch import JobScratch
from nvflare_lazy.scratch.file import ScratchFile
from nvflare_lazy.transport import _received_files
from nvflare_lazy.transport._backends import TORCH
from nvflare_lazy.transport._downloadable import Payload
from nvflare_lazy.transport._received_files import PreallocatedShards
from nvflare_lazy.transport.handoff import layout as layouts
from nvflare_lazy.transport.handoff.copies import Copies
from nvflare_lazy.transport.handoff.layout import Layout

SECRET = torch.full((50_000,), 1234.5)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "scratch"


@pytest.fixture
def sender(root):
    with JobScratch.open(root, job="sender") as job:
        yield job


@pytest.fixture
def receiver(root):
    with JobScratch.open(root, job="receiver") as job:
        yield job


def model(count=6, size=40_000):
    return {f"T{i}": torch.arange(size, dtype=torch.float32) + i for i in range(count)}


def written(values, job):
    """Write tensors to a file of the package, as a receiver does, and return them as lazy ones."""
    payload = Payload(values, TORCH)
    shards = PreallocatedShards(payload.manifest, TORCH, job.download())
    for item in payload.manifest.stored():
        if item.nbytes:
            shards.write(item.offset, memoryview(payload.read(item.offset, item.nbytes)))
    return shards.finish()


def lay_out(payload, job, copies=None):
    layout = Layout(payload, job, job.rendezvous(), copies or Copies())
    assert layout.wait(120)
    return layout


def take(layout, payload, sender, receiver):
    """Take the files as a receiver does, check each tensor, and return the open files."""
    files = layout.files
    files.check(payload.manifest)
    with receiver.visit(sender.rendezvous().lease) as visited:
        download = receiver.download()
        opened = [download.take_link(visited, file.id, file.nbytes) for file in files.files]
    for item in payload.manifest.items:
        index, at = files.place(item)
        found = bytearray(item.nbytes)
        opened[index].read_into(memoryview(found), at)
        assert found == (payload.read(item.offset, item.nbytes) if item.nbytes else b""), item.name
    return opened


def inode(file):
    with file.descriptor() as fd:
        return os.fstat(fd).st_ino


def in_scratch(root):
    """All files of tensors, by their inodes."""
    return {path.stat().st_ino for path in root.rglob("*.safetensors")}


def test_complete_file_goes_as_it_is(sender, receiver, root):
    """The receiver gets the sender's file, and the sender writes nothing; tied and empty tensors are in it."""
    values = model() | {"empty": torch.zeros(0, 3)}
    values["tied"] = values["T2"]
    lazy = written(values, sender)
    payload = Payload(lazy, TORCH)
    before = in_scratch(root)
    layout = lay_out(payload, sender)
    (file,) = take(layout, payload, sender, receiver)
    assert inode(file) == inode(lazy["T0"].source.file())
    assert in_scratch(root) == before
    assert len(layout.files.runs) == 1


def test_dropped_tensor_does_not_leak(sender, receiver):
    """A filter dropped a tensor: the receiver's file does not contain it."""
    lazy = written({**model(), "secret": SECRET}, sender)
    del lazy["secret"]
    payload = Payload(lazy, TORCH)
    (file,) = take(lay_out(payload, sender), payload, sender, receiver)
    contents = bytearray(file.size)
    file.read_into(memoryview(contents), 0)
    assert SECRET.numpy().tobytes()[:4096] not in contents
    assert b"secret" not in contents


def test_file_of_the_user_is_copied_once(sender, receiver, tmp_path):
    """A checkpoint that others may change is never linked, and one copy serves the payloads of all clients."""
    nvflare_lazy.save(model(), tmp_path / "model.safetensors")
    lazy = dict(nvflare_lazy.open(tmp_path / "model.safetensors"))
    copies, taken = Copies(), []
    for _ in range(3):
        payload = Payload(dict(lazy), TORCH)
        layout = lay_out(payload, sender, copies)
        taken.append(take(layout, payload, sender, receiver)[0])
        layout.release()
    assert len(set(map(inode, taken))) == 1
    assert os.stat(tmp_path / "model.safetensors").st_nlink == 1
    assert inode(taken[0]) != os.stat(tmp_path / "model.safetensors").st_ino
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\xff" * 4)
    last = bytearray(4)
    taken[0].read_into(memoryview(last), taken[0].size - 4)
    assert last != b"\xff" * 4
    # The copy is removed with its source.
    used = sender.used
    del lazy, payload, layout
    gc.collect()
    assert sender.used < used


def test_mixed_payload(sender, receiver, monkeypatch):
    """Of shareable files, parts of files, views and memory, only the rest is copied, to few files."""
    monkeypatch.setattr(_received_files, "_MAX_NAMES_PER_FILE", 3)
    complete = written({"a": torch.rand(30_000), "b": torch.rand(200)}, sender)
    part = written({"c": torch.rand(300), "d": torch.rand(700_000), "rest": SECRET}, sender)
    memory = {f"m{i}": torch.rand(10 + i) for i in range(5)} | {"large": torch.rand(3_000_000)}
    values = {
        "m0": memory["m0"],
        **complete,
        "m1": memory["m1"],
        "view": part["d"][1000:2000],
        "c": part["c"],
        "d": part["d"],
        "bits": torch.tensor([True, False, True]),
        **{name: memory[name] for name in ("m2", "m3", "m4", "large")},
    }
    payload = Payload(values, TORCH)
    files = take(lay_out(payload, sender), payload, sender, receiver)
    assert len(files) == 1 + 4
    assert inode(files[0]) == inode(complete["a"].source.file())


def test_many_runs(sender, receiver, monkeypatch):
    """A payload that is in more pieces than a reply may name is copied."""
    monkeypatch.setattr(layouts, "MAX_RUNS", 5)
    lazy = written(model(), sender)
    values = {}
    for i in range(6):
        values |= {f"T{i}": lazy[f"T{i}"], f"m{i}": torch.rand(10)}
    payload = Payload(values, TORCH)
    layout = lay_out(payload, sender)
    (file,) = take(layout, payload, sender, receiver)
    assert len(layout.files.runs) == 1
    assert inode(file) != inode(lazy["T0"].source.file())
    assert len(os.listdir(sender.path / "handoff")) == 2  # the probe, and the copy


@pytest.mark.parametrize("error", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT])
def test_file_that_cannot_be_linked(sender, receiver, monkeypatch, error):
    """A file on another file system, or one without links, is copied to scratch; without links there, nothing goes."""
    lazy = written(model(), sender)
    source = inode(lazy["T0"].source.file())
    sender.rendezvous()
    link = os.link

    def refuse(path, *args, **kwargs):
        if path.startswith("/proc/self/fd/") and (os.stat(path).st_ino == source or error == errno.EPERM):
            raise OSError(error, os.strerror(error))
        link(path, *args, **kwargs)

    monkeypatch.setattr(os, "link", refuse)
    payload = Payload(lazy, TORCH)
    layout = lay_out(payload, sender)
    if error == errno.EPERM:
        assert layout.files is None
        assert os.listdir(sender.path / "handoff") == ["probe"]
    else:
        (file,) = take(layout, payload, sender, receiver)
        assert inode(file) != source


def test_quota(root):
    """Without space for a copy, no file is handed over, and no copy is left or counted."""
    with JobScratch.open(root, job="sender", quota="100KiB") as job:
        layout = lay_out(Payload(model(), TORCH), job)
        assert layout.files is None
        assert job.used == 0
        assert in_scratch(root) == set()


@pytest.fixture
def slow_disk(monkeypatch):
    """Let writes wait until the returned event is set; the second event is set when the first one waits."""
    go, waits, pwrite = threading.Event(), threading.Event(), ScratchFile.pwrite

    def wait(self, buffer, offset):
        if offset:  # not the header
            waits.set()
            go.wait(60)
        return pwrite(self, buffer, offset)

    monkeypatch.setattr(ScratchFile, "pwrite", wait)
    return go, waits


def test_release_stops_the_writer(sender, root, slow_disk):
    """A payload that is released while it is written leaves nothing; the writer ends at its next piece."""
    go, waits = slow_disk
    payload = Payload(model(count=2, size=3_000_000), TORCH)
    layout = Layout(payload, sender, sender.rendezvous(), Copies())
    assert waits.wait(60)
    layout.release()
    go.set()
    assert layout.wait(60)
    assert layout.files is None
    assert sender.used == 0
    assert in_scratch(root) == set()
    assert os.listdir(sender.path / "handoff") == ["probe"]


def test_layouts_that_share_a_copy(sender, receiver, tmp_path, slow_disk, monkeypatch):
    """Two payloads of one file: the second waits for the copy, which continues when the first is released."""
    monkeypatch.setattr("nvflare_lazy.transport.handoff.copies._COPIED_BYTES", 100_000)
    go, waits = slow_disk
    nvflare_lazy.save(model(), tmp_path / "model.safetensors")
    lazy = dict(nvflare_lazy.open(tmp_path / "model.safetensors"))
    copies = Copies()
    first, second = Payload(dict(lazy), TORCH), Payload(dict(lazy), TORCH)
    one = Layout(first, sender, sender.rendezvous(), copies)
    assert waits.wait(60)
    other = Layout(second, sender, sender.rendezvous(), copies)
    assert not other.wait(0.3)
    one.release()
    go.set()
    assert other.wait(60)
    take(other, second, sender, receiver)
    assert other.done == second.manifest.nbytes


def test_dropped_payload(sender):
    """The files of a payload that nothing refers to are taken back."""
    payload = Payload(model(), TORCH)
    layout = lay_out(payload, sender)
    assert layout.files is not None
    assert len(os.listdir(sender.path / "handoff")) == 2
    del payload
    gc.collect()
    assert os.listdir(sender.path / "handoff") == ["probe"]
    assert sender.used == 0
