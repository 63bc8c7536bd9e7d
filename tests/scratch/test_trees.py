# SPDX-License-Identifier: Apache-2.0
"""Directories that no process of this package makes in scratch: removed, or left with a warning, without an error."""

from __future__ import annotations

import os
import random
import socket
import subprocess

import pytest
from click.testing import CliRunner

from nvflare_lazy.cli.clean import clean
from nvflare_lazy.scratch import JobScratch, list_scratch, reclaim
from tests.measure import rss_anon
from tests.scratch.conftest import names

HOSTILE_NAMES = [b"\n", b"-rf", b"\xff\xfe", b"..x", b"\x1b[31m", b" ", b"*", b"n" * 255, "\u202eexe.".encode()]


def make_deep(directory, depth: int) -> None:
    """Make directories in each other, by names relative to the last, and a file in the deepest one."""
    fd = os.open(directory, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("deeper", dir_fd=fd)
        below = os.open("deeper", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    os.close(fd)


@pytest.mark.parametrize("depth", [1500, pytest.param(100_000, marks=pytest.mark.slow)])
def test_deep_directory(root, leave_behind, depth, caplog):
    """Deeper than Python recurses and than a path is long: listed, and removed when the next job starts."""
    make_deep(leave_behind(), depth)
    assert [lease.nbytes for lease in list_scratch(root)] == [1000]
    with JobScratch.open(root, job="job", min_free=0) as job:
        assert names(root) == [job.path.name, f"{job.path.name}.lease"]
    assert "cannot" not in caplog.text


@pytest.mark.slow
def test_wide_directory(root, leave_behind):
    """A million names in a directory are not held in memory."""
    lost = leave_behind()
    fd = os.open(lost / "download", os.O_RDONLY)
    for index in range(1_000_000):
        os.close(os.open(f"{index:06d}-{'n' * 200}", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    os.close(fd)
    before = rss_anon()
    reclaim(root)
    assert rss_anon() - before < 16 << 20
    assert names(root) == []


def grow(directory: bytes, elsewhere: bytes, chance: random.Random, depth: int = 0) -> None:
    """Make a directory of everything that a file system knows, with names that are hard to handle."""
    for name in chance.sample(HOSTILE_NAMES, chance.randrange(len(HOSTILE_NAMES))):
        path = os.path.join(directory, name)
        kind = chance.randrange(8)
        if kind == 0:
            os.symlink(elsewhere, path)
        elif kind == 1:
            os.link(os.path.join(elsewhere, b"file"), path)
        elif kind == 2:
            os.mkfifo(path)
        elif kind == 3 and len(path) < 100:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path)
        elif kind == 4:
            os.symlink(b"loop", path)
        elif kind == 5:
            os.mkdir(path, 0o000)
        elif depth < 4:
            os.mkdir(path)
            grow(path, elsewhere, chance, depth + 1)


@pytest.mark.parametrize("seed", range(12))
def test_any_tree(root, leave_behind, tmp_path, monkeypatch, seed):
    """Links, pipes, sockets and hostile names, in any order, are removed. The targets of links are not."""
    (precious := tmp_path / "precious").mkdir()
    (precious / "file").write_text("keep")
    grow(os.fsencode(leave_behind()), os.fsencode(precious), random.Random(seed))
    listed = CliRunner().invoke(clean, ["--scratch-dir", str(root)])
    removed = CliRunner().invoke(clean, ["--scratch-dir", str(root), "--remove"])
    assert (listed.exit_code, removed.exit_code) == (0, 0), removed.output
    assert names(root) == []
    assert names(precious) == ["file"]
    assert os.stat(precious / "file").st_nlink == 1


def test_entries_of_the_root_that_are_not_what_they_are_called(root, leave_behind, tmp_path):
    """Pipes, sockets, directories and links with the names of leases and of jobs end neither a start nor a list."""
    leave_behind()
    made = []
    for number, make in enumerate([os.mkfifo, os.mkdir, lambda path: os.symlink(tmp_path, path), _make_socket]):
        for suffix in ("", ".lease", ".lease.new"):
            made.append(f"job-{number + 1:016x}{suffix}")
            make(root / made[-1])
    with JobScratch.open(root, job="job", min_free=0):
        assert list_scratch(root)
    assert os.path.isdir(tmp_path)
    assert set(names(root)) <= set(made)


def _make_socket(path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize("bind", [False, True])
def test_mounted_file_system(root, leave_behind, tmp_path, caplog, bind):
    """A file system that is mounted in the tree is neither counted nor emptied; everything else is removed."""
    (precious := tmp_path / "precious").mkdir()
    lost = leave_behind()
    (lost / "download" / "below" / "mounted").mkdir(parents=True)
    what = ["--bind", str(precious)] if bind else ["-t", "tmpfs", "none"]
    if os.geteuid() or subprocess.run(["mount", *what, lost / "download" / "below" / "mounted"]).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        (lost / "download" / "below" / "mounted" / "file").write_text("keep")
        assert [lease.nbytes for lease in list_scratch(root)] == [1000]
        assert reclaim(root) == []
        assert "Cannot reclaim" in caplog.text
        (kept,) = lost.rglob("file")
        assert kept.read_text() == "keep"
        assert not list(lost.rglob("*.safetensors"))
    finally:
        (mounted,) = {path.parent for path in lost.rglob("file")}
        subprocess.run(["umount", mounted], check=True)
    assert len(reclaim(root)) == 1
    assert names(root) == []


def test_unremovable_entry_does_not_keep_the_others(root, leave_behind, monkeypatch, caplog):
    """The space of everything else is free, and the job starts."""
    lost = leave_behind()
    (lost / "immutable").touch()
    unlink = os.unlink

    def resist(path, **options):
        if path == "immutable":
            raise PermissionError(1, "no")
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", resist)
    with JobScratch.open(root, job="job", min_free=0):
        assert names(lost) == ["immutable"]
    assert "Cannot reclaim" in caplog.text
