# SPDX-License-Identifier: Apache-2.0
"""A job's directory: names in it, its end, and another one when it was deleted."""

from __future__ import annotations

import shutil

import pytest

from nvflare_lazy.errors import ScratchReleasedError
from nvflare_lazy.scratch import JobScratch
from tests.scratch.conftest import bytes_of, names


def test_release_of_the_job_releases_its_downloads(root):
    """The end of a job stops running downloads, and leaves an empty root."""
    job = JobScratch.open(root, job="job", min_free=0)
    downloads = [job.download() for _ in range(3)]
    files = [download.new_file() for download in downloads]
    job.release()
    job.release()
    assert job.released
    assert names(root) == []
    for file in files:
        with pytest.raises(ScratchReleasedError):
            file.pwrite(b"x", 0)
    with pytest.raises(ScratchReleasedError, match="open another one"):
        job.download()


@pytest.mark.parametrize("deleted", ["job", "root"])
def test_job_directory_deleted_underneath(root, deleted, caplog):
    """The process continues with its next download in a new directory, and leaves nothing of either."""
    with JobScratch.open(root, job="job", min_free=0) as job:
        lost = job.download()
        first = job.path
        shutil.rmtree(job.path if deleted == "job" else root)
        file = job.download().new_file()
        file.pwrite(b"abc", 0)
        assert bytes_of(file.finish()) == b"abc"
        assert job.path != first
        assert "continuing in a new directory" in caplog.text
        lost.release()
    assert names(root) == []


def test_nothing_of_a_name_from_outside_is_in_a_path(root):
    """Labels and job names are for messages; a suffix that is more than one is refused."""
    with JobScratch.open(root, job="../../evil", min_free=0) as job:
        download = job.download("../../x\0y")
        assert "evil" not in str(job.path)
        assert "x" not in str(download.path.relative_to(root)).replace("job-", "")
        for suffix in ("/../x", "/x", "..", ".a/b", ".\n", ".a.b.c", "x"):
            with pytest.raises(ValueError, match="invalid suffix"):
                download.new_file(suffix)
        assert names(download.path) == []
        assert download.new_file(".tar.gz").path.name == "00001.tar.gz"
