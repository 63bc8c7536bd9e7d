# SPDX-License-Identifier: Apache-2.0
"""An abort cannot race a write: release against writers, against itself, and from the most awkward places."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from nvflare_lazy.errors import ScratchReleasedError
from nvflare_lazy.scratch import JobScratch
from nvflare_lazy.scratch import download as download_module
from nvflare_lazy.scratch import file as file_module
from tests.measure import open_files
from tests.scratch.conftest import names


def write_until_released(download, started):
    """Make and write files until the download is released; return the error that ended it."""
    block = bytes(32 << 10)
    try:
        while True:
            file = download.new_file()
            started.set()
            for number in range(8):
                file.pwrite(block, number * len(block))
            file.finish()
    except Exception as error:
        return error


@pytest.mark.parametrize("what", ["download", "job"])
def test_release_races_eight_writers(root, what, no_gc):
    """When release returns, nothing is left, and every writer ends with the one error that gives the reason."""
    rounds = {"download": 60, "job": 20}[what]
    open_before = open_files()
    with ThreadPoolExecutor(8) as pool, JobScratch.open(root, job="job", min_free=0) as outer:
        for _ in range(rounds):
            job = JobScratch.open(root, job="job", min_free=0) if what == "job" else outer
            download = job.download()
            started = threading.Event()
            writers = [pool.submit(write_until_released, download, started) for _ in range(8)]
            started.wait()
            time.sleep(random.random() / 500)
            (job if what == "job" else download).release()
            assert not download.path.exists()
            assert [type(writer.result()) for writer in writers] == [ScratchReleasedError] * 8
            assert job.used == 0
            assert what == "download" or not job.path.exists()
        assert names(outer.path) == []
    assert names(root) == []
    assert open_files() == open_before


def test_everybody_who_releases_finds_it_gone(job, monkeypatch):
    """Two threads that release at once both come back only when the directory is gone."""
    remove = download_module.remove_tree

    def slowly(*arguments, **options):
        time.sleep(0.1)
        return remove(*arguments, **options)

    monkeypatch.setattr(download_module, "remove_tree", slowly)
    download = job.download()

    def release_and_look(_):
        download.release()
        return download.path.exists()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(release_and_look, range(4))) == [False] * 4


def test_long_write_is_cut_short(job, monkeypatch):
    """Release does not wait for the end of a write of gigabytes, only for its current piece."""
    monkeypatch.setattr(file_module, "_PIECE", 4096)
    download = job.download()
    file = download.new_file()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(file.pwrite, bytes(256 << 20), 0)
        while file._end == 0:
            time.sleep(0.001)
        download.release()
        assert file._end < 256 << 20
        assert isinstance(writing.exception(), ScratchReleasedError)
    assert job.used == 0


@pytest.fixture
def hanging_disk(monkeypatch):
    """Writes that hang until the event is set."""
    go_on, write = threading.Event(), os.pwrite

    def hang(*arguments):
        go_on.wait()
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", hang)
    yield go_on
    go_on.set()


def test_release_does_not_hang_with_the_disk(job, monkeypatch, hanging_disk, caplog):
    """A write that does not come back is not waited for for ever, and cannot do harm when it does."""
    monkeypatch.setattr(download_module, "_SLOW_WRITE_SECONDS", 0.2)
    open_before = open_files()
    download = job.download()
    file = download.new_file()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(file.pwrite, bytes(1000), 0)
        while not download._directory._writers:
            time.sleep(0.001)
        download.release()
        assert not download.path.exists()
        assert "hanging" in caplog.text
        hanging_disk.set()
        assert isinstance(writing.exception(), ScratchReleasedError)
    assert open_files() == open_before
    assert job.used == 0


def test_release_explains_what_it_broke(job, monkeypatch, hanging_disk):
    """A write that fails because of the release reports the release, not what became of it."""
    monkeypatch.setattr(download_module, "_SLOW_WRITE_SECONDS", 0.1)
    monkeypatch.setattr(file_module, "CHECK_INTERVAL_BYTES", 1)  # notices that its file is gone
    download = job.download()
    file = download.new_file()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(file.pwrite, bytes(1000), 0)
        while not download._directory._writers:
            time.sleep(0.001)
        download.release()
        hanging_disk.set()
        assert type(writing.exception()) is ScratchReleasedError


def test_release_while_a_file_is_created(job, monkeypatch):
    """A signal handler that releases the download in the middle of making a file leaves neither file nor descriptor."""
    open_before = open_files()
    download = job.download()
    create = os.open

    def create_and_be_interrupted(*arguments, **options):
        monkeypatch.setattr(os, "open", create)
        fd = create(*arguments, **options)
        download.release()
        return fd

    monkeypatch.setattr(os, "open", create_and_be_interrupted)
    with pytest.raises(ScratchReleasedError):
        download.new_file()
    assert names(job.path) == []
    assert open_files() == open_before


def overwrite_without_end(file):
    while True:
        file.pwrite(bytes(1 << 20), 0)


def test_release_from_a_signal_handler(job):
    """An abort signal finds its thread in the middle of a write: waiting for that would never end."""
    open_before = open_files()
    for _ in range(20):
        download = job.download()
        file = download.new_file()
        before = signal.signal(signal.SIGUSR1, partial(lambda download, *of_signal: download.release(), download))
        try:
            timer = threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            with pytest.raises(ScratchReleasedError):
                overwrite_without_end(file)
            timer.join()
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert not download.path.exists()
    file.close()
    assert open_files() == open_before
    assert job.used == 0


def test_collection_in_the_middle_of_everything(root):
    """Garbage collection may end a download inside any call, in any thread, without a deadlock."""
    thresholds = gc.get_threshold()

    def make_garbage(_):
        for _ in range(40):
            download = job.download(reserve=10)
            download.new_file().pwrite(bytes(100), 0)
            circle = [download]
            circle.append(circle)

    with JobScratch.open(root, job="job", min_free=0) as job:
        gc.set_threshold(1, 1, 1)
        try:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(make_garbage, range(4)))
        finally:
            gc.set_threshold(*thresholds)
        del pool
        gc.collect()
        assert names(job.path) == []
        assert job.used == 0


def test_what_cannot_be_removed_stays_on_the_account(job, monkeypatch, caplog):
    """Bytes that are still on the disk are not available to others; the end of the job tries again."""

    def refuse(*arguments, **options):
        raise PermissionError(1, "no")

    with monkeypatch.context() as patched:
        patched.setattr(download_module, "remove_tree", refuse)
        download = job.download()
        download.new_file().pwrite(bytes(1000), 0)
        download.release()
    assert "Cannot remove" in caplog.text
    assert job.used == 1000
    job.release()
    assert names(job.root) == []
