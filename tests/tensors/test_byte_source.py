# SPDX-License-Identifier: Apache-2.0
"""Byte sources: files, memory and slices of them, and how a file is shared and released."""

from __future__ import annotations

import errno
import os
import random
import threading
import weakref

import numpy as np
import pytest

from nvflare_lazy.errors import NVFlareLazyError, SourceError, SourceReleasedError, TruncatedSourceError
from nvflare_lazy.tensors import tensor_file
from nvflare_lazy.tensors.byte_source import FailedSource, MemorySource, SourceSlice
from nvflare_lazy.tensors.tensor_file import FileSource, TensorFile, open_source
from tests.measure import open_files
from tests.tensors.byte_source_contract import ByteSourceContract

DATA = random.Random(1).randbytes(1000)


class TestFileSource(ByteSourceContract):
    def make(self, tmp_path):
        path = tmp_path / "file"
        path.write_bytes(b"head" + DATA + b"tail")
        return FileSource(TensorFile(path), 4, len(DATA)), DATA


class TestMemorySource(ByteSourceContract):
    def make(self, tmp_path):
        return MemorySource(DATA), DATA


class TestSourceSlice(ByteSourceContract):
    def make(self, tmp_path):
        return SourceSlice(MemorySource(b"abc" + DATA + b"d"), 3, len(DATA)), DATA


def descriptors() -> int:
    return open_files()


def test_short_reads_are_continued(tmp_path, monkeypatch):
    """The kernel may return less than was asked for: large reads are put together from parts."""
    monkeypatch.setattr(tensor_file, "_MAX_READ_BYTES", 7)
    (tmp_path / "file").write_bytes(DATA)
    assert bytes(open_source(tmp_path / "file").read()) == DATA


def test_descriptor_lives_as_long_as_a_slice(tmp_path, no_gc):
    """Each file has one descriptor, which closes with the last slice, together with the objects that it keeps alive."""

    class Lease:
        pass

    (tmp_path / "file").write_bytes(DATA)
    before, lease = descriptors(), Lease()
    gone = weakref.ref(lease)
    file = TensorFile(tmp_path / "file")
    file.own(lease)
    source = FileSource(file, 0, 100)
    parts = [source.slice(i, 10) for i in range(50)]
    del source, lease, file
    assert descriptors() == before + 1
    assert gone() is not None
    assert bytes(parts[7].read()) == DATA[7:17]
    parts.clear()
    assert descriptors() == before
    assert gone() is None


def test_survives_rename_and_removal(tmp_path):
    """The file is never looked up by name again."""
    path = tmp_path / "file"
    path.write_bytes(DATA)
    source = open_source(path)
    path.unlink()
    path.write_bytes(b"x" * len(DATA))
    assert bytes(source.read()) == DATA


def test_truncation_is_an_error(tmp_path):
    """A file that shrinks after it was opened raises an error that names it, not zeros and not a signal."""
    path = tmp_path / "file"
    path.write_bytes(DATA)
    source = open_source(path)
    os.truncate(path, 500)
    assert bytes(source.read(0, 500)) == DATA[:500]
    with pytest.raises(TruncatedSourceError, match=r"file ends at byte 500, 1 bytes before"):
        source.read(400, 101)


def test_promise_beyond_the_file_is_an_error(tmp_path):
    """A tensor cannot be laid beyond the end of its file."""
    (tmp_path / "file").write_bytes(DATA)
    with pytest.raises(TruncatedSourceError, match="1000 bytes"):
        FileSource(TensorFile(tmp_path / "file"), 999, 2)


def test_kernel_errors_are_ours(tmp_path, monkeypatch):
    """An I/O error of the kernel is raised as a `SourceError` that is also an `OSError`."""
    (tmp_path / "file").write_bytes(DATA)
    source = open_source(tmp_path / "file")

    def fail(*args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(SourceError, match="Input/output error") as caught:
        source.read()
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, NVFlareLazyError)


def test_closed_file_raises(tmp_path):
    """Reading a released source raises; releasing it twice does not."""
    (tmp_path / "file").write_bytes(DATA)
    file = TensorFile(tmp_path / "file")
    source = FileSource(file, 0, 10)
    file.close()
    file.close()
    assert file._descriptor is None
    with pytest.raises(SourceReleasedError, match="was released"):
        source.read()


def test_close_never_races_a_read(tmp_path):
    """A close under running reads never lets them see the bytes of a file that got the same descriptor."""
    (tmp_path / "a").write_bytes(b"a" * 4096)
    (tmp_path / "b").write_bytes(b"b" * 4096)
    wrong: list[bytes] = []
    for _ in range(200):
        file = TensorFile(tmp_path / "a")
        source = FileSource(file, 0, 4096)
        barrier = threading.Barrier(3)

        def read(source=source, barrier=barrier) -> None:
            barrier.wait()
            try:
                for _ in range(20):
                    data = bytes(source.read())
                    if data != b"a" * 4096:
                        wrong.append(data)
            except SourceReleasedError:
                pass

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        barrier.wait()
        file.close()
        others = [os.open(tmp_path / "b", os.O_RDONLY) for _ in range(4)]
        for reader in readers:
            reader.join()
        for other in others:
            os.close(other)
    assert not wrong


def test_failed_source_raises_a_fresh_copy():
    """A failure raises on every use, of the same type and text, and does not collect the frames of earlier ones."""
    error = SourceError("the sender died")
    source = FailedSource(8, error)
    for _ in range(3):
        with pytest.raises(SourceError, match="the sender died") as caught:
            source.read()
        assert caught.value is not error
    assert error.__traceback__ is None
    assert "the sender died" in source.describe()
    assert source.read(0, 0) == b""


class TwoPartError(Exception):
    """Cannot be copied: its constructor takes other arguments than it keeps."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def test_failures_that_cannot_be_copied_are_told_in_other_words():
    """The text survives an exception whose constructor does not accept its arguments."""
    source = FailedSource(8, TwoPartError("this", "that"))
    with pytest.raises(SourceError, match="TwoPartError: this and that"):
        source.read()


def test_an_error_that_is_kept_keeps_no_file_open(tmp_path):
    """A caller that keeps an error with its traceback does not keep the descriptor, and so the space on disk."""
    (tmp_path / "file").write_bytes(DATA)
    before = descriptors()
    source = open_source(tmp_path / "file")
    os.truncate(tmp_path / "file", 0)
    with pytest.raises(TruncatedSourceError) as caught:
        source.read()
    source._file.close()
    assert descriptors() == before
    assert caught.value.__traceback__ is not None


def test_nothing_is_read_into_an_empty_buffer(tmp_path):
    """Buffers with a zero in their shape, which Python does not cast, are filled with nothing."""
    (tmp_path / "file").write_bytes(DATA)
    open_source(tmp_path / "file").read_into(np.zeros((3, 0)), 7)
    assert MemorySource(np.zeros((0, 4), np.float32)).nbytes == 0
