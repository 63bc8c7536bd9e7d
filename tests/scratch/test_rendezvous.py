# SPDX-License-Identifier: Apache-2.0
"""Files that one process gives to another on the same file system, as hard links."""

from __future__ import annotations

import hmac
import os
import struct
import time
from pathlib import Path

import pytest

from nvflare_lazy.errors import QuotaExceededError, ScratchError, TruncatedSourceError
from nvflare_lazy.scratch import JobScratch
from nvflare_lazy.scratch.rendezvous import copy_ranges, host_token, is_ours, open_shown
from nvflare_lazy.tensors.tensor_file import TensorFile
from tests.scratch.conftest import bytes_of, names, show, written

MIB = 1 << 20
DATA = os.urandom(3 * MIB)


@pytest.fixture
def receiver(root):
    with JobScratch.open(root, job="receiver", min_free=0, quota=8 * MIB) as receiver:
        yield receiver


def test_a_shown_file_is_taken_as_a_link(job, receiver):
    """No byte is copied, the receiver counts the file, and the link outlives the sender."""
    file = written(job, DATA)
    assert is_ours(file)
    id = show(job, file)
    with receiver.visit(job.rendezvous().lease) as visited:
        assert visited.proof("ref") == job.rendezvous().proof("ref") != visited.proof("other ref")
        taken = receiver.download().take_link(visited, id, len(DATA))
        assert bytes_of(open_shown(visited, id, len(DATA))) == DATA
        job.rendezvous().take_back([id])
        with pytest.raises(ScratchError):
            open_shown(visited, id, len(DATA))
    assert is_ours(taken)
    assert taken.is_still_at(file.path)
    assert receiver.used == len(DATA)
    job.release()
    assert bytes_of(taken) == DATA
    del taken
    assert receiver.used == 0
    assert not names(receiver.path)


def test_a_lent_file_is_written_again_after_the_receiver_has_removed_its_link(job, receiver):
    """It is neither written nor counted as free before."""
    file = written(job, DATA)
    inode = os.stat(file.path).st_ino
    id = show(job, file)
    assert os.stat(file.path).st_mode & 0o777 == 0o400
    assert job.free() <= os.statvfs(job.path).f_bavail * os.statvfs(job.path).f_frsize
    with receiver.visit(job.rendezvous().lease) as visited:
        taken = receiver.download().take_link(visited, id, len(DATA))
    job.rendezvous().take_back([id])
    del file
    other = written(job, b"x" * len(DATA))
    assert os.stat(other.path).st_ino != inode
    assert bytes_of(taken) == DATA
    del taken, other
    again = {os.stat(file.path).st_ino for file in (written(job, DATA), written(job, DATA))}
    assert inode in again


def test_a_failed_link_counts_nothing(job, receiver):
    """Afterwards the quota has enough space for it, and nothing is left in the directory."""
    file = written(job, DATA)
    id = show(job, file)
    download = receiver.download()
    with receiver.visit(job.rendezvous().lease) as visited:
        for wrong_id, nbytes in ((id, 5), ("0" * 32, len(DATA)), ("../" + id[3:], len(DATA)), (7, len(DATA))):
            with pytest.raises(ScratchError):
                download.take_link(visited, wrong_id, nbytes)
        with pytest.raises(QuotaExceededError):
            download.take_link(visited, id, 9 * MIB)
        assert receiver.used == 0
        assert not names(download.path)
        download.take_link(visited, id, len(DATA))


def test_ranges_are_copied(job):
    """Also from a file that is not ours."""
    source = written(job, DATA)
    file = job.download().new_file()
    with source.descriptor() as fd:
        copy_ranges(fd, [(MIB, 2 * MIB, 0), (0, 10, 2 * MIB)], file)
        with pytest.raises(TruncatedSourceError):
            copy_ranges(fd, [(MIB, 3 * MIB, 0)], job.download().new_file())
    assert bytes_of(file.finish()) == DATA[MIB:] + DATA[:10]


@pytest.mark.parametrize(("start", "nbytes", "at"), [(72, 9000, 4168), (8192, 8192, 0), (5, 4000, 5), (1, 9000, 2)])
def test_blocks_are_shared_where_possible(job, monkeypatch, start, nbytes, at):
    """Whole blocks at the same place within one; bytes around them are copied, and all are if sharing is refused."""
    shared = []

    def share_blocks(fd, request, fields):
        source, begin, count, end = struct.unpack("=qQQQ", fields)
        assert [number % 4096 for number in (begin, count, end)] == [0, 0, 0]
        shared.append(count)
        os.pwrite(fd, os.pread(source, count, begin), end)

    source = written(job, DATA)
    for shares in (False, True):
        with monkeypatch.context() as patch, source.descriptor() as fd:
            if shares:
                patch.setattr("nvflare_lazy.scratch.file.fcntl.ioctl", share_blocks)
            file = job.download().new_file()
            file.pwrite(bytes(at), 0)
            copy_ranges(fd, [(start, nbytes, at)], file)
            assert bytes_of(file.finish()) == bytes(at) + DATA[start : start + nbytes]
    assert shared == {72: [4096], 8192: [8192]}.get(start, [])


def test_files_of_others_are_not_ours(tmp_path):
    """A file that the user gave is not shown."""
    (tmp_path / "model").write_bytes(DATA)
    assert not is_ours(TensorFile(tmp_path / "model"))


def test_only_other_leases_are_visited(job, root):
    """A name from a peer is a lease under the own root, or nothing."""
    lease = job.rendezvous().lease
    assert job.visit(lease) is None
    with JobScratch.open(root, job="receiver", min_free=0) as receiver:
        for wrong in ("", "..", f"{lease}/", f"../{Path(root).name}/{lease}", "job-" + "0" * 16, 7, None):
            assert receiver.visit(wrong) is None
        assert receiver.visit(lease) is not None


def test_the_token_depends_on_the_nonce():
    """It does not reveal equal hosts to a peer with another boot id."""
    assert host_token("a") == host_token("a") != host_token("b")
    assert hmac.compare_digest(host_token("\ud800"), host_token("\ud800"))


@pytest.mark.slow
def test_a_spill_costs_little_from_the_second_one(job, receiver):
    """The pages of the last file are written over after the receiver has removed its link."""
    size, piece = 512 * MIB, 4 * MIB
    block = os.urandom(piece)
    receiver._quota.limit = None
    seconds = []
    for _ in range(4):
        begin = time.process_time()
        file = job.download().new_file()
        file.preallocate(size)
        for offset in range(0, size, piece):
            file.pwrite(block, offset)
        finished = file.finish()
        id = show(job, finished)
        seconds.append(time.process_time() - begin)
        with receiver.visit(job.rendezvous().lease) as visited:
            taken = receiver.download().take_link(visited, id, size)
        job.rendezvous().take_back([id])
        del file, finished
        del taken
    print("CPU seconds of each spill:", *(f"{each:.3f}" for each in seconds))
    assert min(seconds[1:]) <= 0.1
