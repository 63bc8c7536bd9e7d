# SPDX-License-Identifier: Apache-2.0
"""Writing one file, from any thread, in any order, and finishing it."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nvflare_lazy.errors import ScratchDeletedError, ScratchError
from nvflare_lazy.scratch import JobScratch
from nvflare_lazy.scratch import file as file_module
from tests.measure import open_files
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
    """Reserved bytes that were not written are neither in the file nor on the account."""
    download = job.download()
    file = download.new_file()
    file.preallocate(1 << 20)
    assert job.used == 1 << 20
    file.pwrite(bytes(1000), 0)
    assert job.used == 1 << 20
    assert file.finish().size == 1000
    assert job.used == 1000
    assert job._quota._pending == 0


def test_finished_file_takes_no_more(job):
    """Writing to a file that has readers raises an error, and so does finishing it twice."""
    file = job.download().new_file()
    file.pwrite(b"abc", 0)
    finished = file.finish()
    with pytest.raises(ValueError, match="is already finished or closed"):
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
    with pytest.raises(ValueError, match="is already finished or closed"):
        file.finish()
    file.close()


def test_forgotten_file_is_closed(job):
    """A file that is dropped unfinished does not keep its descriptor until its download ends."""
    download = job.download()
    before = open_files()
    download.new_file().pwrite(b"abc", 0)
    assert open_files() == before


def test_link_in_the_way_is_not_followed(job, tmp_path):
    """A file that already exists at the path is an error, and the target of a link stays unchanged."""
    (precious := tmp_path / "precious").write_text("keep")
    download = job.download()
    (download.path / "00001.safetensors").symlink_to(precious)
    with pytest.raises(ScratchError, match="File exists"):
        download.new_file()
    assert precious.read_text() == "keep"
    download.release()
    assert precious.read_text() == "keep"


def test_file_deleted_while_it_is_written(job, monkeypatch):
    """A long write does not continue into a file that was unlinked."""
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


def test_file_being_written_keeps_the_directory(root):
    """The writer of a file needs to hold neither its download nor its job."""
    file = JobScratch.open(root, job="job", min_free=0).download().new_file()
    gc.collect()
    file.pwrite(b"abc", 0)
    assert bytes_of(file.finish()) == b"abc"
    del file
    gc.collect()
    assert names(root) == []
