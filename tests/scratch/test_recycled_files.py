# SPDX-License-Identifier: Apache-2.0
"""Files of ended downloads are reused by the next ones, unless another process or tensor could still read them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvflare_lazy.errors import ScratchError, SourceReleasedError
from nvflare_lazy.scratch import JobScratch, _recycled_files
from nvflare_lazy.tensors.tensor_file import FileSource
from tests.scratch.conftest import bytes_of

MIB = 1 << 20
OLD, NEW = b"o" * (3 * MIB), b"n" * (2 * MIB)


def opened(download, data=OLD):
    file = download.new_file()
    file.preallocate(len(data))
    file.pwrite(data, 0)
    return file.finish()


def received(download, data=OLD):
    return Path(opened(download, data).path)


def recycled(job):
    place = job.path / "recycled"
    return sorted(path.stat().st_size for path in place.iterdir()) if place.exists() else []


def test_the_next_download_has_the_same_file(job):
    """A released file is used again, cut to the written size, and counts only while it is in use."""
    download = job.download()
    path = received(download)
    inode = path.stat().st_ino
    download.release()
    assert not path.exists()
    assert job.used == 0
    assert recycled(job) == [len(OLD)]
    again = job.download()
    path = received(again, NEW)
    assert path.stat().st_ino == inode
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == NEW
    assert job.used == len(NEW)
    assert recycled(job) == []


def test_a_mapped_file_is_not_used_again(job):
    """Even after its last descriptor is closed: an operator that reads the mapping must not see new bytes."""
    download = job.download()
    file = opened(download)
    memory = file.map(0, len(OLD))
    file.close()
    del file
    download.release()
    received(job.download(), NEW)
    assert bytes(memory) == OLD


def test_files_that_grow(job):
    """A recycled file that is too small is extended; a file of unknown size is cut at the end."""
    download = job.download()
    received(download, NEW)
    download.release()
    download = job.download()
    assert received(download, OLD).read_bytes() == OLD
    download.release()
    download = job.download()
    file = download.new_file()
    file.pwrite(b"short", 0)
    assert bytes_of(file.finish()) == b"short"


def test_small_files_are_not_kept(job):
    """It is not worth it."""
    download = job.download()
    received(download, b"x" * (MIB // 2))
    download.release()
    assert recycled(job) == []


def test_a_file_that_is_being_read_is_not_used_again(job):
    """A reader that has it open reads the old contents to the end, even after a release."""
    download = job.download()
    file = opened(download)
    source = FileSource(file, 0, len(OLD))
    download.release()
    assert recycled(job) == []
    received(job.download(), NEW)
    assert source.read() == OLD


def test_a_file_that_was_closed_is_used_again(job):
    """Closing and releasing, as `LazyTensorDict.cleanup()` does, keeps it; the old source cannot read the new bytes."""
    download = job.download()
    file = opened(download)
    source = FileSource(file, 0, len(OLD))
    file.close()
    download.release()
    assert recycled(job) == [len(OLD)]
    received(job.download(), NEW)
    with pytest.raises(SourceReleasedError):
        source.read()


def test_the_last_reference_keeps_it(job, no_gc):
    """A download also ends when its last tensor is deleted."""
    download = job.download()
    file = opened(download)
    source = FileSource(file, 0, len(OLD))
    del download, file, source
    assert recycled(job) == [len(OLD)]


def test_a_file_open_in_another_process_is_not_used_again(job):
    """The kernel detects any process that has the file open."""
    download = job.download()
    path = received(download)
    script = "import sys; f = open(sys.argv[1], 'rb'); print('open', flush=True); input(); print(f.read(3).decode())"
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "open\n"
    download.release()
    assert recycled(job) == []
    received(job.download(), NEW)
    assert other.communicate("\n", timeout=500)[0] == "ooo\n"


def test_a_file_with_another_name_is_not_used_again(job, tmp_path):
    """A checkpoint may be the very file that was received."""
    download = job.download()
    os.link(received(download), tmp_path / "checkpoint")
    download.release()
    assert recycled(job) == [len(OLD)]
    held = job.download()
    received(held, NEW)
    assert (tmp_path / "checkpoint").read_bytes() == OLD
    inode = (tmp_path / "checkpoint").stat().st_ino
    (tmp_path / "checkpoint").unlink()
    assert received(job.download(), NEW).stat().st_ino == inode


def test_recycled_files_make_room_for_the_quota(root):
    """Used and recycled files together stay within the quota; the oldest recycled file is removed first."""
    with JobScratch.open(root, job="job", min_free=0, quota=7 * MIB) as job:
        downloads = [job.download() for _ in range(2)]
        for download in downloads:
            received(download)
        for download in downloads:
            download.release()
        assert len(recycled(job)) == 2
        held = [job.download(reserve=4 * MIB)]
        assert len(recycled(job)) == 1
        held.append(job.download(reserve=3 * MIB))
        assert job.used == 7 * MIB
        assert recycled(job) == []


def test_recycled_files_make_room_on_the_disk(job, monkeypatch):
    """Where the disk would be too full with them, recycled files go before a download is refused."""
    download = job.download()
    received(download)
    download.release()

    def small_disk(path):
        free = MIB if recycled(job) else MIB + len(OLD)
        return os.statvfs_result((4096, 4096, 0, 0, free // 4096, 0, 0, 0, 0, 255))

    monkeypatch.setattr("nvflare_lazy.scratch._quota.os.statvfs", small_disk)
    assert job.free() == MIB + len(OLD)
    job.download(reserve=2 * MIB)
    assert recycled(job) == []


def test_without_leases_nothing_is_kept(job, monkeypatch):
    """On a file system that cannot report open files, no file is recycled."""

    def refuse(fd, command, *rest):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(_recycled_files.fcntl, "fcntl", refuse)
    download = job.download()
    path = received(download)
    download.release()
    assert recycled(job) == []
    assert not path.parent.exists()


def test_no_file_is_lost_without_descriptors(job, monkeypatch):
    """A file that cannot be examined for the moment is kept; one that never could be is removed."""
    download, other = job.download(), job.download()
    path = received(download)
    received(other)
    inode = path.stat().st_ino
    download.release()
    original = os.open

    def refuse(name, flags, *rest, **options):
        if flags == _recycled_files._READ:
            raise OSError(24, "Too many open files")
        return original(name, flags, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(ScratchError, match="Too many open files"):
            job.download().new_file()
        other.release()
    assert recycled(job) == [len(OLD)]
    assert received(job.download()).stat().st_ino == inode


def test_nothing_is_left_of_the_job(root):
    """Recycled files go with the job."""
    with JobScratch.open(root, job="job", min_free=0) as job:
        download = job.download()
        received(download)
        download.release()
        received(job.download())
    assert [path.name for path in root.iterdir() if path.name.startswith("job-")] == []
