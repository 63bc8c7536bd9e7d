# SPDX-License-Identifier: Apache-2.0
"""Telling disks from memory that looks like one."""

from __future__ import annotations

import os

import pytest

from nvflare_lazy import _system
from nvflare_lazy.scratch import JobScratch, inspect_root

MOUNTS = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
23 22 0:23 / /dev/shm rw - tmpfs tmpfs rw,size=24684100k
24 22 0:24 / /mnt/with\040space rw - nfs4 server:/export rw,vers=4.2
25 22 0:25 / /tmp rw master:2 propagate_from:1 - tmpfs tmpfs rw
26 25 254:1 / /tmp rw - xfs /dev/vdb rw
27 22 0:27 / /merged rw - overlay overlay rw,lowerdir=/,upperdir=/dev/shm,workdir=/dev/shm
28 22 0:28 / /container rw - overlay overlay rw,lowerdir=/,upperdir=/out/of/sight,workdir=/x
29 22 253:0 / /compressed rw - ext4 /dev/zram0 rw
30 22 0:30 / /dev/shmoo rw - btrfs /dev/sdb rw
31 22 this line is cut short
"""


@pytest.fixture
def _made_up_mounts(tmp_path, monkeypatch):
    (table := tmp_path / "mountinfo").write_text(MOUNTS)
    monkeypatch.setattr(_system, "_MOUNTS", table)
    monkeypatch.setattr("os.path.realpath", lambda path: str(path))
    monkeypatch.setattr("os.path.isdir", lambda path: not str(path).startswith("/out"))
    root = os.statvfs("/")
    monkeypatch.setattr("os.statvfs", lambda path: root)


@pytest.mark.usefixtures("_made_up_mounts")
@pytest.mark.parametrize(
    ("path", "kind", "memory_backed"),
    [
        ("/var/scratch", "ext4", False),
        ("/dev/shm", "tmpfs", True),
        ("/dev/shm/a/b", "tmpfs", True),
        ("/dev/shmoo/a", "btrfs", False),
        ("/mnt/with space/a", "nfs4", False),
        ("/tmp/a", "xfs", False),
        ("/merged/a", "overlay", True),
        ("/container/a", "overlay", False),
        ("/compressed/a", "ext4", True),
    ],
)
def test_file_system_of_a_path(path, kind, memory_backed):
    """The longest mount point counts, the last mount on it; an overlay is where its upper directory is."""
    report = inspect_root(path)
    assert (report.file_system, report.memory_backed) == (kind, memory_backed)


def test_unknown_where_the_system_does_not_tell(tmp_path, monkeypatch):
    """Without a table of mounts nothing is claimed, and the sizes are still there."""
    monkeypatch.setattr(_system, "_MOUNTS", tmp_path / "nothing")
    report = inspect_root(tmp_path)
    assert (report.file_system, report.memory_backed) == ("unknown", False)
    assert 0 < report.free <= report.total


def test_directory_that_does_not_exist_yet(tmp_path):
    """If the directory does not exist yet, the report describes the directory in which it would be made."""
    report = inspect_root(tmp_path / "not" / "yet")
    assert report.path == tmp_path
    assert report.writable
    assert report.warnings == ()
    assert not (tmp_path / "not").exists()


def test_place_that_cannot_be_written_to_is_warned_about(tmp_path, monkeypatch):
    """A root that this user may not write to cannot be used, and the warning has a remedy."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    report = inspect_root(tmp_path)
    assert not report.writable
    assert "Set NVFLARE_LAZY_SCRATCH" in report.warnings[0]


def test_memory_is_warned_about(small_disk, caplog):
    """A root on tmpfs works, and says at the start that it saves no memory, and what to do."""
    with JobScratch.open(small_disk, job="job") as job:
        assert job.root_info.memory_backed
        assert job.root_info.file_system == "tmpfs"
    (warning,) = job.root_info.warnings
    assert warning in caplog.text
    assert "is memory" in warning
    assert "8.0 MiB" in warning
    assert "NVFLARE_LAZY_SCRATCH" in warning
    caplog.clear()
    JobScratch.open(small_disk, job="job", warn=False).release()
    assert caplog.text == ""
