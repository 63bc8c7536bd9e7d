# SPDX-License-Identifier: Apache-2.0
"""Writing a download's files, and what keeps its directory."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref

import pytest

from nvflare_lazy.errors import ScratchDeletedError, ScratchReleasedError
from tests import measure
from tests.measure import open_files
from tests.scratch.conftest import bytes_of, names


def test_released_download_takes_no_more(job):
    """After release the directory is gone, the quota is free, and every use raises an error with the reason."""
    download = job.download("of site-1")
    file = download.new_file()
    file.pwrite(bytes(1000), 0)
    download.release()
    assert not download.path.exists()
    assert names(job.path) == []
    assert (job.used, job.peak) == (0, 1000)
    uses = [lambda: file.pwrite(b"x", 0), lambda: file.preallocate(1), file.finish]
    for use in [*uses, download.new_file, lambda: download.adopt("x")]:
        with pytest.raises(ScratchReleasedError, match="'of site-1' was released"):
            use()
    file.close()
    download.release()
    assert job.used == 0


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


def test_open_files_are_readable_after_release(job):
    """Releasing a download removes its directory, but a reader keeps the bytes."""
    download = job.download()
    file = download.new_file()
    file.pwrite(b"abc", 0)
    reader = file.finish()
    download.release()
    buffer = bytearray(3)
    reader.read_into(memoryview(buffer), 0)
    assert buffer == b"abc"


def test_download_directory_deleted_underneath(job):
    """Each step detects that the directory is gone and raises an error; the next download works."""
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


def test_cycles_do_not_grow(job):
    """Downloads that are released or collected leave no descriptors, threads, memory or files."""

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

    def state() -> tuple[int, int, int]:
        gc.collect()
        return open_files(), threading.active_count(), _finalizers()

    for number in range(100):
        cycle(number)
    before, memory = state(), measure.rss_anon()
    for number in range(500):
        cycle(number)
    # Threads of tests before this one may end.
    assert all(now <= then for now, then in zip(state(), before, strict=True))
    assert names(job.path) == []
    assert measure.rss_anon() - memory < 1 << 20
    assert job.used == 0


def _finalizers() -> int:
    return len(weakref.finalize._registry)
