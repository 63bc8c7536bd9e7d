# SPDX-License-Identifier: Apache-2.0
"""The streaming writer: pieces arrive in any order from any thread, complete and once, or no file is written."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import nvflare_lazy
from nvflare_lazy import _system
from nvflare_lazy.errors import MetadataMismatchError, SaveError, SourceError
from nvflare_lazy.formats import LazyTensorDict, StreamingWriter, TensorMeta, read_header, save
from nvflare_lazy.formats.safetensors import _copy
from nvflare_lazy.formats.safetensors.writer import WrittenRanges
from nvflare_lazy.tensors.byte_source import FailedSource, MemorySource
from nvflare_lazy.tensors.tensor_file import TensorFile, open_source
from tests.measure import open_files

META = [TensorMeta("w", "F32", [300, 1000]), TensorMeta("b", "I64", [7]), TensorMeta("e", "U8", [0])]


def files(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


@pytest.mark.parametrize("max_shard_size", [None, 1000])
def test_tiles_from_many_threads(tmp_path: Path, max_shard_size: int | None) -> None:
    """Tiles of any size, in any order, from eight threads make the file that saving at once makes."""
    tensors = {"w": torch.randn(300, 1000), "b": torch.arange(7), "e": torch.empty(0, dtype=torch.uint8)}
    chance = random.Random(0)
    tiles = []
    for name, tensor in tensors.items():
        data = bytes(tensor.reshape(-1).view(torch.uint8).numpy())
        cuts = sorted({0, len(data), *(chance.randrange(len(data) + 1) for _ in range(min(len(data), 60)))})
        tiles += [(name, begin, data[begin:end]) for begin, end in itertools.pairwise(cuts)]
    chance.shuffle(tiles)
    with (
        StreamingWriter(tmp_path / "m.safetensors", META, metadata={"k": "v"}, max_shard_size=max_shard_size) as writer,
        ThreadPoolExecutor(8) as pool,
    ):
        for future in [pool.submit(writer.write, *tile) for tile in tiles]:
            future.result()
    save(tensors, tmp_path / "whole", metadata={"k": "v"})
    if max_shard_size is None:
        assert (tmp_path / "m.safetensors").read_bytes() == (tmp_path / "whole").read_bytes()
    written = nvflare_lazy.open(tmp_path / "m.safetensors")
    assert written.metadata == {"format": "pt", "k": "v"}
    assert all(torch.equal(written[name].materialize(), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("max_shard_size", [None, 8])
def test_a_commit_returns_open_files_with_their_contents(tmp_path: Path, max_shard_size: int | None) -> None:
    """The layout that the writer reports is the layout that a reader finds, and a replaced file stays readable."""
    meta = [TensorMeta("a", "U8", [6]), TensorMeta("b", "F32", [1])]
    with StreamingWriter(tmp_path / "m", meta, max_shard_size=max_shard_size) as writer:
        writer.write("a", 0, b"abcdef")
        writer.write("b", 0, bytes(4))
        committed = writer.commit()
    assert len(committed) == (1 if max_shard_size is None else 2)
    for file in committed:
        assert file.contents == read_header(TensorFile(file.path)).tensors
        assert file.is_still_at(file.path)
    tensors = LazyTensorDict.from_files(committed)
    save({"a": torch.zeros(1)}, writer.checkpoint_path, max_shard_size=max_shard_size)
    assert bytes(tensors["a"].tolist()) == b"abcdef"


def test_nothing_is_seen_before_the_end(tmp_path: Path) -> None:
    """Before the commit no file exists under any name; after it one does."""
    with StreamingWriter(tmp_path / "m", [TensorMeta("a", "U8", [3])]) as writer:
        writer.write("a", 1, b"bc")
        writer.write("a", 0, b"a")
        assert files(tmp_path) == []
        assert [file.path for file in writer.commit()] == [str(tmp_path / "m")]
        assert files(tmp_path) == ["m"]
        with pytest.raises(SaveError, match="after the save ended"):
            writer.commit()
    assert bytes(load_file(tmp_path / "m")["a"]) == b"abc"


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (lambda writer: None, MetadataMismatchError, "'a' was promised and never written"),
        (lambda writer: writer.write("a", 0, b"12"), MetadataMismatchError, "bytes 2 to 4 of tensor 'a'"),
        (lambda writer: writer.write("a", 1, b"12"), MetadataMismatchError, "bytes 0 to 1 of tensor 'a'"),
        (lambda writer: (writer.write("a", 0, b"1"), writer.write("a", 3, b"1")), MetadataMismatchError, "1 to 3"),
        (lambda writer: (writer.write("a", 0, b"1234"), writer.write("a", 2, b"1")), MetadataMismatchError, "2 to 3"),
        (lambda writer: writer.write("a", 2, b"123"), MetadataMismatchError, "has 4 bytes as promised, not 2 to 5"),
        (lambda writer: writer.write("x", 0, b"1"), MetadataMismatchError, "tensor 'x' was not promised"),
        (
            lambda writer: writer.copy("a", MemorySource(b"12345")),
            MetadataMismatchError,
            "4 bytes as promised, not 0 to 5",
        ),
        (lambda writer: writer.copy("a", MemorySource(b"123")), MetadataMismatchError, "3 to 4"),
        (lambda writer: writer.copy("a", FailedSource(4, SourceError("gone"))), SourceError, "gone"),
    ],
)
def test_incomplete_and_surplus(tmp_path: Path, write, error, message) -> None:
    """The error names each missing, duplicate or surplus range, and the previous file stays."""
    (tmp_path / "m").write_bytes(b"old")
    writer = StreamingWriter(tmp_path / "m", [TensorMeta("a", "U8", [4])])
    with pytest.raises(error, match=message), writer:
        write(writer)
    assert files(tmp_path) == ["m"]
    assert (tmp_path / "m").read_bytes() == b"old"


@pytest.mark.parametrize("offset", [-1, -5])
def test_offsets_are_not_negative(tmp_path: Path, offset: int) -> None:
    """A negative offset would write into the tensor before."""
    with (
        pytest.raises(MetadataMismatchError, match="as promised, not -"),
        StreamingWriter(tmp_path / "m", [TensorMeta("a", "U8", [4])]) as writer,
    ):
        writer.write("a", offset, b"12345"[:4])
    assert files(tmp_path) == []


def test_a_mistake_in_a_thread_is_not_forgotten(tmp_path: Path) -> None:
    """A tile that was written twice stops the commit, even if the error in the writing thread was ignored."""
    writer = StreamingWriter(tmp_path / "m", [TensorMeta("a", "U8", [4])])
    writer.write("a", 0, b"1234")

    def twice() -> None:
        with pytest.raises(MetadataMismatchError, match="written twice"):
            writer.write("a", 0, b"9")

    thread = threading.Thread(target=twice)
    thread.start()
    thread.join()
    with pytest.raises(MetadataMismatchError, match="written twice"):
        writer.commit()
    assert files(tmp_path) == []


def test_writes_after_the_end(tmp_path: Path) -> None:
    """A late tile raises an error of this package, and is never written to another file with the same descriptor."""
    writer = StreamingWriter(tmp_path / "m", [TensorMeta("a", "U8", [4])])
    writer.abort()
    writer.abort()
    with open(tmp_path / "other", "wb") as other:
        with pytest.raises(SaveError, match="after the save ended"):
            writer.write("a", 0, b"1234")
        with pytest.raises(SaveError):
            writer.commit()
        assert other.tell() == 0
    assert files(tmp_path) == ["other"]


def test_abort_while_threads_write(tmp_path: Path) -> None:
    """An abort in the middle of other threads' writes closes nothing under them."""
    nbytes = 1 << 22
    writer = StreamingWriter(tmp_path / "m", [TensorMeta(str(index), "U8", [nbytes]) for index in range(4)])
    started = threading.Barrier(5)
    errors: list[BaseException] = []

    def write(name: str) -> None:
        started.wait()
        try:
            for offset in range(0, nbytes, 4096):
                writer.write(name, offset, bytes(4096))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(str(index),)) for index in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    writer.abort()
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    assert all(type(error) is SaveError for error in errors)
    assert files(tmp_path) == []


def test_dropped_without_an_end(tmp_path: Path) -> None:
    """A writer that is forgotten leaves nothing."""
    before = open_files()
    writer = StreamingWriter(tmp_path / "m", [TensorMeta("a", "U8", [4])])
    assert open_files() == before + 1
    del writer
    assert open_files() == before
    assert files(tmp_path) == []


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=12))
def test_written_ranges(pairs: list[tuple[int, int]]) -> None:
    """The writer records exactly the written ranges: the first gap, and whether a range is new."""
    ranges, there = WrittenRanges(12), set()
    for one, other in pairs:
        begin, end = sorted((one, other))
        added = set(range(begin, end))
        assert ranges.add(begin, end) == there.isdisjoint(added)
        if there.isdisjoint(added):
            there |= added
        missing = sorted(set(range(12)) - there)
        gap = ranges.first_gap
        if not missing:
            assert gap is None
        else:
            assert gap is not None
            assert gap[0] == missing[0]
            assert set(range(*gap)) <= set(missing)
            assert gap[1] == 12 or gap[1] in there


# ---- _copy by a file server ----------------------------------------------------------------------------------


class Server:
    """Replacement for a file system whose server copies, in full, in part or not at all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mood: str) -> None:
        self.copied = 0
        self.mood = mood
        self._copy = os.copy_file_range
        monkeypatch.setattr(_copy, "_server_copies", lambda device: True)
        monkeypatch.setattr(os, "copy_file_range", self)

    def __call__(self, source: int, target: int, count: int, offset: int, target_offset: int) -> int:
        if self.mood.startswith("E") and (self.copied or self.mood != "EIO later"):
            raise OSError(getattr(errno, self.mood.split()[0]), self.mood)
        if self.mood == "nothing":
            return 0
        if self.mood == "halfway" and self.copied > 1_000_000:
            raise OSError(errno.EINVAL, "enough")
        done = self._copy(source, target, min(count, 777_777), offset, target_offset)
        self.copied += done
        return done


@pytest.mark.parametrize("mood", ["short copies", "nothing", "halfway", "EXDEV", "EINVAL", "ENOSYS", "EOPNOTSUPP"])
def test_a_server_copies_what_it_will(tmp_path: Path, monkeypatch, mood: str) -> None:
    """Ranges that the server does not copy, in parts or at all, are copied here; none is missing or written twice."""
    save({"a": torch.randn(1_000_003), "b": torch.randn(5)}, tmp_path / "one")
    server = Server(monkeypatch, mood)
    lazy = nvflare_lazy.open(tmp_path / "one")
    save(lazy, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert (server.copied > 0) == (mood in ("short copies", "halfway"))


def test_which_file_systems_have_a_server(tmp_path: Path, monkeypatch) -> None:
    """Network file systems are recognized in the kernel's list of mounts, also behind optional fields."""
    mounts = (
        "22 1 254:0 / / rw,relatime - ext4 /dev/root rw\n"
        "40 22 0:51 / /data rw,relatime shared:1 master:2 - nfs4 server:/data rw,vers=4.2\n"
        "41 22 0:52 / /share rw - cifs //server/share rw\n"
    )
    (tmp_path / "mountinfo").write_text(mounts)
    monkeypatch.setattr(_system, "_MOUNTS", tmp_path / "mountinfo")
    _copy._server_copies.cache_clear()
    try:
        devices = [os.makedev(254, 0), os.makedev(0, 51), os.makedev(0, 52), os.makedev(0, 99)]
        assert [_copy._server_copies(device) for device in devices] == [False, True, True, False]
    finally:
        _copy._server_copies.cache_clear()


def test_a_server_that_fails(tmp_path: Path, monkeypatch) -> None:
    """An error of the disk is not mistaken for a file system that cannot copy."""
    save({"a": torch.randn(1_000_003)}, tmp_path / "one")
    Server(monkeypatch, "EIO later")
    with pytest.raises(OSError, match="EIO"):
        save(nvflare_lazy.open(tmp_path / "one"), tmp_path / "two")
    assert files(tmp_path) == ["one"]


def test_a_server_is_asked_only_where_there_is_one(tmp_path: Path, monkeypatch) -> None:
    """On a local file system, and from one to another, tiles go through a buffer, which is faster."""
    save({"a": torch.randn(100)}, tmp_path / "one")

    def refuse(*args: object) -> int:
        raise AssertionError("not here")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    save(nvflare_lazy.open(tmp_path / "one"), tmp_path / "two")
    monkeypatch.setattr(_copy, "_server_copies", lambda device: True)
    real = os.fstat
    source = open_source(tmp_path / "one")

    def elsewhere(fd: int) -> os.stat_result:
        found = real(fd)
        with source.file_range()[0].descriptor() as lent:
            values = list(found)
            values[2] += fd == lent
            return os.stat_result(values)

    monkeypatch.setattr(_copy.os, "fstat", elsewhere)
    with StreamingWriter(tmp_path / "three", [TensorMeta("a", "U8", [source.nbytes])]) as writer:
        writer.copy("a", source)
    assert bytes(load_file(tmp_path / "three")["a"]) == (tmp_path / "one").read_bytes()
