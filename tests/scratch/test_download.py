# SPDX-License-Identifier: Apache-2.0
"""Writing a download's files, and what keeps its directory."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nvflare_lazy.errors import NVFlareLazyError, ScratchDeletedError, ScratchError, ScratchReleasedError
from nvflare_lazy.scratch import JobScratch
from nvflare_lazy.scratch import file as file_module
from tests import measure
from tests.scratch.conftest import bytes_of, names


def test_written_bytes_are_in_the_file(job):
    """Writes of anything with a buffer, in any order."""
    file = job.download().new_file()
    assert file.pwrite(b"abc", 0) == 3
    assert file.pwrite(np.arange(3, dtype="<u2"), 10) == 6
    assert file.pwrite(memoryview(bytearray(b"de")), 3) == 2
    assert file.pwrite(b"", 0) == file.pwrite(np.empty((0, 3)), 99) == 0
    assert bytes_of(file.finish()) == b"abcde" + bytes(5) + b"\0\0\1\0\2\0"


def test_one_file_from_many_threads(job, monkeypatch):
    """Each thread writes its part, in more than one piece, and no part ends up elsewhere."""
    monkeypatch.setattr(file_module, "_PIECE", 1000)
    file = job.download().new_file()
    parts = [bytes([number]) * 4321 for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: file.pwrite(parts[number], number * 4321), reversed(range(64))))
    assert bytes_of(file.finish()) == b"".join(parts)


def test_preallocated_file_ends_where_it_was_written_to(job):
    """What was set aside and not written is neither in the file nor on the account."""
    download = job.download()
    file = download.new_file()
    file.preallocate(1 << 20)
    assert job.used == 1 << 20
    file.pwrite(bytes(1000), 0)
    assert job.used == 1 << 20
    assert file.finish().size == 1000
    assert job.used == download.nbytes == 1000
    assert job._quota._pending == 0


def test_nothing_of_a_name_from_outside_is_in_a_path(root):
    """Labels and job names are for messages; a suffix that is more than one is refused."""
    with JobScratch.open(root, job="../../evil", min_free=0) as job:
        download = job.download("../../x\0y")
        assert "evil" not in str(job.path)
        assert "x" not in str(download.path.relative_to(root)).replace("job-", "")
        for suffix in ("/../x", "/x", "..", ".a/b", ".\n", ".a.b.c", "x"):
            with pytest.raises(ValueError, match="not a suffix"):
                download.new_file(suffix)
        assert names(download.path) == []
        assert download.new_file(".tar.gz").path.name == "00001.tar.gz"


def test_link_in_the_way_is_not_followed(job, tmp_path):
    """Should something be where a file is to be made, it is an error, and what a link leads to stays as it is."""
    (precious := tmp_path / "precious").write_text("keep")
    download = job.download()
    (download.path / "00001.safetensors").symlink_to(precious)
    with pytest.raises(ScratchError, match="File exists"):
        download.new_file()
    assert precious.read_text() == "keep"
    download.release()
    assert precious.read_text() == "keep"


def test_finished_file_takes_no_more(job):
    """Writing to a file that has readers is a mistake, and so is finishing it twice."""
    file = job.download().new_file()
    file.pwrite(b"abc", 0)
    finished = file.finish()
    with pytest.raises(ValueError, match="was finished or closed"):
        file.finish()
    with pytest.raises(ValueError, match="after it was finished"):
        file.pwrite(b"d", 0)
    with pytest.raises(ValueError, match="after it was finished"):
        file.preallocate(100)
    assert bytes_of(finished) == b"abc"


def test_closed_file_is_not_finished(job):
    """A file that is closed as it is does not look finished."""
    file = job.download().new_file()
    file.pwrite(b"abc", 0)
    file.close()
    with pytest.raises(ValueError, match="was finished or closed"):
        file.finish()
    file.close()


def test_forgotten_file_is_closed(job):
    """A file that is dropped unfinished does not keep its descriptor until its download ends."""
    download = job.download()
    before = len(os.listdir("/proc/self/fd"))
    download.new_file().pwrite(b"abc", 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_released_download_takes_no_more(job):
    """After release the directory is gone, the bytes are back, and every use raises the error that says so."""
    download = job.download("of site-1")
    file = download.new_file()
    file.pwrite(bytes(1000), 0)
    download.release()
    assert download.released
    assert not download.path.exists()
    assert names(job.path) == []
    assert (job.used, job.peak, download.nbytes) == (0, 1000, 0)
    uses = [lambda: file.pwrite(b"x", 0), lambda: file.preallocate(1), file.finish]
    for use in [*uses, download.new_file, lambda: download.adopt("x")]:
        with pytest.raises(ScratchReleasedError, match="'of site-1' was released"):
            use()
    file.close()
    download.release()
    assert job.used == 0


def test_errors_are_of_one_tree():
    """A receiver catches whatever happens to its scratch in one clause."""
    assert issubclass(ScratchReleasedError, ScratchError)
    assert issubclass(ScratchError, NVFlareLazyError)
    assert issubclass(ScratchError, OSError)


def test_release_of_the_job_releases_its_downloads(root):
    """The end of a job stops what is still coming, and leaves an empty root."""
    job = JobScratch.open(root, job="job", min_free=0)
    downloads = [job.download() for _ in range(3)]
    files = [download.new_file() for download in downloads]
    job.release()
    job.release()
    assert job.released
    assert names(root) == []
    assert all(download.released for download in downloads)
    for file in files:
        with pytest.raises(ScratchReleasedError):
            file.pwrite(b"x", 0)
    with pytest.raises(ScratchReleasedError, match="open another one"):
        job.download()


def test_last_tensor_keeps_the_directory(job):
    """The directory lives as long as an open file of it, and goes at once with the last, without a collection."""
    download = job.download()
    files = [download.new_file() for _ in range(2)]
    for file in files:
        file.pwrite(b"abc", 0)
    sources = [file.finish() for file in files]
    path = download.path
    gc.disable()
    try:
        del download, files, file
        assert path.is_dir()
        del sources[0]
        assert path.is_dir()
        buffer = bytearray(3)
        sources[0].read_into(memoryview(buffer), 0)
        assert buffer == b"abc"
        sources.clear()
        assert not path.exists()
        assert job.used == 0
    finally:
        gc.enable()


def test_file_being_written_keeps_the_directory(root):
    """Whoever writes to a file needs neither hold its download nor its job."""
    file = JobScratch.open(root, job="job", min_free=0).download().new_file()
    gc.collect()
    file.pwrite(b"abc", 0)
    assert bytes_of(file.finish()) == b"abc"
    del file
    gc.collect()
    assert names(root) == []


def test_open_files_are_readable_after_release(job):
    """Releasing a download takes its directory, not the bytes under somebody who is reading them."""
    download = job.download()
    file = download.new_file()
    file.pwrite(b"abc", 0)
    reader = file.finish()
    download.release()
    buffer = bytearray(3)
    reader.read_into(memoryview(buffer), 0)
    assert buffer == b"abc"


def test_download_directory_deleted_underneath(job):
    """Each step notices that the directory is gone and says so; the next download goes well."""
    download = job.download()
    file, unfinished = download.new_file(), download.new_file()
    file.pwrite(b"abc", 0)
    shutil.rmtree(download.path)
    with pytest.raises(ScratchDeletedError, match="deleted"):
        download.new_file()
    with pytest.raises(ScratchDeletedError, match="deleted"):
        file.finish()
    with pytest.raises(ScratchDeletedError, match="deleted"):
        unfinished.finish()
    download.release()
    assert job.used == 0
    after = job.download().new_file()
    after.pwrite(b"abc", 0)
    assert bytes_of(after.finish()) == b"abc"


def test_file_deleted_while_it_is_written(job, monkeypatch):
    """A long write does not go on into a file that has no name any more."""
    monkeypatch.setattr(file_module, "CHECK_INTERVAL_BYTES", 1 << 20)
    monkeypatch.setattr(file_module, "_PIECE", 1 << 18)
    file = job.download().new_file()
    file.pwrite(bytes(1000), 0)
    file.path.unlink()
    with pytest.raises(ScratchDeletedError, match="while it was being written"):
        file.pwrite(bytes(8 << 20), 0)
    assert file._end < 2 << 20


def test_file_replaced_by_another(job, tmp_path):
    """The file that `finish` returns is the one that was written, wherever its directory is, or none is returned."""
    download = job.download()
    replaced, moved = download.new_file(), download.new_file()
    for file in (replaced, moved):
        file.pwrite(b"abc", 0)
    replaced.path.unlink()
    replaced.path.write_bytes(b"xyz")
    with pytest.raises(ScratchDeletedError):
        replaced.finish()
    download.path.rename(tmp_path / "moved")
    download.path.mkdir()
    moved.path.write_bytes(b"xyz")
    assert bytes_of(moved.finish()) == b"abc"


@pytest.mark.parametrize("deleted", ["job", "root"])
def test_job_directory_deleted_underneath(root, deleted, caplog):
    """The process goes on with its next download in a new directory, and leaves nothing of either."""
    with JobScratch.open(root, job="job", min_free=0) as job:
        lost = job.download()
        first = job.path
        shutil.rmtree(job.path if deleted == "job" else root)
        file = job.download().new_file()
        file.pwrite(b"abc", 0)
        assert bytes_of(file.finish()) == b"abc"
        assert job.path != first
        assert "going on in a new one" in caplog.text
        lost.release()
    assert names(root) == []


def test_cycles_do_not_grow(job):
    """Downloads that come and go, released or collected, leave no descriptors, threads, memory or files."""

    def cycle(number: int) -> None:
        download = job.download("a label", reserve=2000)
        file = download.new_file()
        file.pwrite(bytes(1000), 0)
        reader = file.finish()
        if number % 2:
            download.release()
        elif number % 5 == 0:
            circle = [reader, download]
            circle.append(circle)

    def state() -> tuple[int, int, int, list[str]]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), _finalizers(), names(job.path)

    for number in range(300):
        cycle(number)
    before, memory = state(), measure.rss_anon()
    for number in range(2000):
        cycle(number)
    assert state() == before
    assert measure.rss_anon() - memory < 1 << 20
    assert job.used == 0


def _finalizers() -> int:
    return len(weakref.finalize._registry)
