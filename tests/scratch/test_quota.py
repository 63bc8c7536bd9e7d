# SPDX-License-Identifier: Apache-2.0
"""The quota is exact, whatever the order of reserving, writing and releasing."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvflare_lazy.errors import DiskFullError, QuotaExceededError, ScratchDeletedError, ScratchError
from nvflare_lazy.scratch import JobScratch, _quota
from tests.scratch.conftest import write_without_end


@pytest.fixture
def job(root):
    with JobScratch.open(root, job="job", quota=1000, min_free=0) as job:
        yield job


def test_quota_bounds_a_sender_that_never_ends(job):
    """Repeated writes end at the quota, and the next download has the complete quota again."""
    download = job.download()
    file = download.new_file()
    with pytest.raises(QuotaExceededError, match=r"quota of 1000 B \(980 B used\)"):
        write_without_end(file, bytes(70))
    assert job.used == job.peak == 980
    assert file.path.stat().st_size == 980
    download.release()
    assert job.used == 0
    job.download().new_file().pwrite(bytes(1000), 0)


def test_far_away_offset_counts(job):
    """One byte at a far offset claims all that comes before it, before anything is written."""
    file = job.download().new_file()
    with pytest.raises(QuotaExceededError):
        file.pwrite(b"x", 1000)
    assert file.path.stat().st_size == job.used == 0
    file.pwrite(b"x", 999)
    assert job.used == 1000
    file.finish()
    assert job.used == 1000
    assert job._quota._pending == 0  # the hole stays unfilled


def test_expected_bytes_are_taken_first(job):
    """What a download expects is held from the start, and is not counted twice when it comes."""
    first = job.download(reserve=600)
    assert (job.used, job.free()) == (600, 400)
    with pytest.raises(QuotaExceededError) as refused:
        job.download(reserve=401)
    assert refused.traceback  # which holds on to all that was made
    assert len(list(job.path.iterdir())) == 1
    first.new_file().pwrite(bytes(500), 0)
    assert job.used == 600
    file = first.new_file()
    file.pwrite(bytes(300), 0)
    assert job.used == 800
    second = job.download(reserve=200)
    second.new_file().pwrite(bytes(50), 0)
    second.release()
    first.release()
    assert (job.used, job.peak, job.free()) == (0, 1000, 1000)


def test_negative_expectation(job):
    """A size from an untrusted sender does not lower the amount in use."""
    with pytest.raises(ValueError, match="got -1"):
        job.download(reserve=-1)
    with pytest.raises(ValueError, match="got -1"):
        job.download().new_file().pwrite(b"x", -1)
    assert job.used == 0


def test_adopted_file_is_counted_once(root, disk):
    """A file that was written without this package, as aggregates are, is charged its reservation and no more."""
    with JobScratch.open(root, job="job", min_free=0) as job:
        before = job.free()
        download = job.download(reserve=256_000)
        assert job.free() == before - 256_000
        (download.path / "model").write_bytes(bytes(200_000))
        disk.free -= 200_000
        download.adopt("model")
        assert (job.used, job.free()) == (200_000, before - 200_000)
        download.adopt("model")
        (download.path / "more").write_bytes(bytes(1000))
        disk.free -= 1000
        download.adopt("more")
        assert (job.used, job.peak, job.free()) == (201_000, 256_000, before - 201_000)
        (download.path / "model").unlink()
        (download.path / "more").write_bytes(bytes(500))
        download.adopt("more")
        assert job.used == 500
        download.release()
        assert (job.used, job._quota._pending) == (0, 0)


def test_file_beyond_the_quota_is_not_adopted(job):
    """What the job may not hold is said, and not counted; it goes with its directory."""
    download = job.download(reserve=400)
    (download.path / "model").write_bytes(bytes(1001))
    with pytest.raises(QuotaExceededError):
        download.adopt("model")
    assert job.used == 400
    download.release()
    assert job.used == 0


def test_only_plain_files_of_the_directory_are_adopted(job, tmp_path):
    """Only names of existing regular files are accepted: no links and no paths."""
    (tmp_path / "elsewhere").write_bytes(bytes(100))
    download = job.download()
    (download.path / "link").symlink_to(tmp_path / "elsewhere")
    (download.path / "directory").mkdir()
    os.mkfifo(download.path / "pipe")
    for name in ("link", "directory", "pipe", "..", ".", "", "directory/x", "../model", str(tmp_path / "elsewhere")):
        with pytest.raises(ScratchError):
            download.adopt(name)
    with pytest.raises(ScratchDeletedError):
        download.adopt("missing")
    assert job.used == 0


def test_many_threads_get_exactly_the_quota(root):
    """However many threads reserve at once, the sum of the reservations is the quota, to the byte."""
    with JobScratch.open(root, job="job", quota=1 << 20, min_free=0) as job:
        downloads = [job.download() for _ in range(16)]
        got = []

        def take_all(download):
            file, mine = download.new_file(), 0
            try:
                while True:
                    mine += file.pwrite(bytes(64), mine)
            except QuotaExceededError:
                got.append(mine)

        threads = [threading.Thread(target=take_all, args=(download,)) for download in downloads]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 16
        assert sum(got) == job.used == job.peak == 1 << 20
        assert job.free() == 0
        for download in downloads:
            download.release()
        assert job.used == 0


def test_return_in_the_middle_of_an_addition():
    """A garbage collection may free bytes between any two steps of a reservation; the account stays exact."""

    class Colliding(int):
        def __radd__(self, other):
            collections.append(space.release(1, 1))
            return other + int(self)

    collections = []
    space = _quota.Quota("/", None, 0)
    space.reserve(100)
    space.reserve(Colliding(10))
    assert len(collections) > 1
    assert space.used == 110 - len(collections)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "reserve", "write", "preallocate", "finish", "adopt", "release", "forget"]),
        st.integers(0, 3),
        st.integers(0, 400),
        st.integers(0, 400),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(steps=STEPS)
def test_account_agrees_with_a_model(tmp_path_factory, steps):
    """After any steps, the bytes in use are the bytes of files plus all reservations; at the end they are zero."""
    with JobScratch.open(tmp_path_factory.mktemp("root"), job="job", quota=1500, min_free=0) as job:
        downloads = [_Modelled(job) for _ in range(4)]
        for step, which, offset, size in steps:
            downloads[which].do(step, offset, size)
            assert job.used == sum(download.held for download in downloads) <= 1500
        for download in downloads:
            download.do("release", 0, 0)
        assert (job.used, job.free(), job._quota._pending) == (0, 1500, 0)


class _Modelled:
    """A download and a model of its account."""

    def __init__(self, job):
        self.job = job
        self.clear()

    def clear(self):
        self.download = self.file = None
        self.expected = self.in_files = self.file_held = self.file_end = self.adopted = 0

    @property
    def held(self):
        return self.expected + self.in_files + self.file_held + self.adopted

    def do(self, step, offset, size):
        room = 1500 - self.job.used
        if step in ("release", "forget"):
            if step == "release" and self.download:
                self.download.release()
            self.clear()
        elif self.download is None:
            self.download = self.job.download()
        elif step == "reserve":
            self.expected += self.tried(lambda: self.download._directory.reservation.reserve(size), size, room)
        elif step == "adopt":
            (self.download.path / "adopted").write_bytes(bytes(size))
            beyond = max(0, size - self.adopted - self.expected)
            if self.tried(lambda: self.download.adopt("adopted"), beyond, room) == beyond and beyond <= room:
                self.expected, self.adopted = 0, size
        elif self.file is None:
            self.file = self.download.new_file()
        elif step == "finish":
            self.file.finish()
            self.in_files += self.file_end
            self.file, self.file_held, self.file_end = None, 0, 0
        elif step in ("write", "preallocate"):
            end = offset + size
            more = max(0, end - self.file_held)
            act = (
                (lambda: self.file.pwrite(bytes(size), offset))
                if step == "write"
                else (lambda: self.file.preallocate(end))
            )
            beyond = max(0, more - self.expected)
            if self.tried(act, beyond, room) == beyond and beyond <= room:
                self.expected -= more - beyond
                self.file_held += more
                if step == "write" and size:
                    self.file_end = max(self.file_end, end)

    @staticmethod
    def tried(act, nbytes, room):
        """Do it; return how many bytes it should have held."""
        if nbytes <= room:
            act()
            return nbytes
        with pytest.raises(QuotaExceededError):
            act()
        return 0


class _Disk:
    """A disk as statvfs reports it."""

    def __init__(self, free):
        self.free = free
        self.looks = 0

    def statvfs(self, place):
        self.looks += 1
        return self

    @property
    def f_bavail(self):
        return self.free

    f_frsize = f_blocks = 1


@pytest.fixture
def disk(monkeypatch):
    """A made-up disk with a hundred million bytes."""
    disk = _Disk(100_000_000)
    monkeypatch.setattr(_quota.os, "statvfs", disk.statvfs)
    return disk


def test_guard_keeps_what_must_stay_free(disk):
    """Reserved bytes count like written bytes, and the refusal has a remedy."""
    space = _quota.Quota("/place", None, 10_000_000)
    space.reserve(60_000_000)
    with pytest.raises(DiskFullError, match=r"/place has 95.4 MiB free.*lower min_free"):
        space.reserve(30_000_001)
    assert space.free() == 30_000_000
    space.reserve(30_000_000)


def test_guard_sees_other_programs(disk):
    """A disk that other programs fill ends the write, before it is full."""
    space = _quota.Quota("/place", None, 10_000_000)
    space.reserve(80_000_000)
    disk.free = 40_000_000
    space.record_written(_quota.CHECK_INTERVAL_BYTES // 2, 70_000_000)
    with pytest.raises(DiskFullError):
        space.record_written(_quota.CHECK_INTERVAL_BYTES // 2, 60_000_000)


def test_download_that_stalls_does_not_end_another(root, disk):
    """On a disk that other programs fill there is space for one of two downloads: the writing one gets it."""
    with JobScratch.open(root, job="job", min_free=0) as job:
        stalled, honest = job.download("of site-1", reserve=60_000_000), job.download("of site-2", reserve=20_000_000)
        disk.free = 30_000_000
        file = honest.new_file()
        for piece in range(20):
            file.pwrite(bytes(1_000_000), piece * 1_000_000)
            disk.free -= 1_000_000
        assert file.finish().size == 20_000_000
        with pytest.raises(DiskFullError, match="already reserved"):
            write_without_end(stalled.new_file(), bytes(1_000_000))


def test_guard_looks_now_and_then(disk):
    """Looking at the disk at every write would be waste."""
    space = _quota.Quota("/place", None, 0)
    for _ in range(1000):
        space.reserve(50_000)
        disk.free -= 50_000
        space.record_written(50_000, 0)
    assert disk.looks <= 2 + 50_000_000 // _quota.CHECK_INTERVAL_BYTES
    disk.free = 0
    with pytest.raises(DiskFullError):
        space.reserve(_quota.CHECK_INTERVAL_BYTES)


def test_what_stays_free_by_default():
    """1 GiB of a usual disk, a twentieth of a small one."""
    assert _quota.min_free_bytes(None, 1 << 40) == 1 << 30
    assert _quota.min_free_bytes(None, 1 << 30) == (1 << 30) // 20
    assert _quota.min_free_bytes("10%", 1 << 40) == (1 << 40) // 10
