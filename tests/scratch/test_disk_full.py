# SPDX-License-Identifier: Apache-2.0
"""A disk that fills up costs the download that filled it, and nothing else."""

from __future__ import annotations

import pytest

from nvflare_lazy.errors import DiskFullError
from nvflare_lazy.scratch import JobScratch
from tests.scratch.conftest import SMALL_DISK, names, write_without_end

MIB = 1 << 20


@pytest.fixture
def open_job(small_disk):
    """Opener of jobs on the small disk."""
    jobs = []

    def open_job(**options):
        jobs.append(JobScratch.open(small_disk, job="job", warn=False, **options))
        return jobs[-1]

    yield open_job
    for job in jobs:
        job.release()


def test_kernel_says_full(open_job, small_disk):
    """ENOSPC in the middle of a write has a name, leaves nothing, and the next download goes well."""
    job = open_job(min_free=0)
    download = job.download("of site-1")
    file = download.new_file()
    file.pwrite(bytes(2 * MIB), 0)
    with (small_disk / "of another program").open("wb", buffering=0) as other:
        other.write(bytes(5 * MIB))
    with pytest.raises(DiskFullError, match=f"{file.path}: No space left.*free some space"):
        file.pwrite(bytes(3 * MIB), 2 * MIB)
    download.release()
    assert job.used == 0
    assert names(job.path) == []
    after = job.download().new_file()
    after.pwrite(bytes(2 * MIB), 0)
    assert after.finish().size == 2 * MIB


def test_full_before_anything_is_written(open_job):
    """What cannot fit is refused when it is announced, and makes no directory."""
    job = open_job(min_free=0)
    with pytest.raises(DiskFullError, match="too little"):
        job.download(reserve=SMALL_DISK)
    assert names(job.path) == []
    assert job.used == 0
    file = job.download().new_file()
    with pytest.raises(DiskFullError, match="too little"):
        file.pwrite(b"x", SMALL_DISK)
    assert file.path.stat().st_blocks == 0


def test_setting_aside_takes_real_space(open_job, small_disk):
    """Where it is cheap the disk itself promises the space: no other program can take it."""
    job = open_job(min_free=0)
    file = job.download().new_file()
    file.preallocate(6 * MIB)
    with (small_disk / "of another program").open("wb", buffering=0) as other:
        assert other.write(bytes(6 * MIB)) <= 2 * MIB
    file.pwrite(bytes(6 * MIB), 0)
    assert file.finish().size == 6 * MIB


def test_some_stays_free(open_job, small_disk):
    """Writing ends with min_free left for other programs."""
    job = open_job(min_free="25%")
    file = job.download().new_file()
    with pytest.raises(DiskFullError, match=r"2\.0 MiB of min_free"):
        write_without_end(file, bytes(100_000))
    assert 2 * MIB <= job.root_info.total - file.path.stat().st_size <= 2 * MIB + 200_000
    assert job.free() < 100_000


# Where no disk can be mounted, only this limit remains: the limit on file sizes also fails in the middle of a write.
LIMITED = """
import resource, sys
from nvflare_lazy.errors import DiskFullError
from nvflare_lazy.scratch import JobScratch

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
with JobScratch.open(sys.argv[1], job="job", min_free=0) as job:
    download = job.download()
    file = download.new_file()
    try:
        file.pwrite(bytes(3 << 20), 0)
    except DiskFullError as error:
        print(file.path.stat().st_size, error)
    download.release()
    print(job.used, [path.name for path in job.path.iterdir()])
    file = job.download().new_file()
    file.pwrite(bytes(1 << 20), 0)
    print(file.finish().size)
"""


def test_limit_on_file_sizes(start_child, root):
    """EFBIG is treated as a full disk, after a partial write; the process continues."""
    child = start_child(LIMITED, root)
    said = child.says()
    assert said.startswith(f"{MIB} cannot write to {root}")
    assert "ulimit -f" in said
    assert child.says() == "0 []"
    assert child.says() == str(MIB)
    assert child.ends() == 0
    assert names(root) == []
