# SPDX-License-Identifier: Apache-2.0
"""`StreamingWriter`: writes a safetensors checkpoint in pieces, in any order and from many threads.

Aggregation and `save()` write with it. The metadata is declared first, so the header is known before the first byte
arrives and nothing is buffered. A checkpoint that does not match its declared metadata is never published.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from bisect import bisect_left, insort
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nvflare_lazy._text import parse_size, quoted
from nvflare_lazy.errors import MetadataMismatchError, SaveError
from nvflare_lazy.formats._commit import LocalOutput, Shard
from nvflare_lazy.formats._remote_commit import RemoteOutput, scratch_directory
from nvflare_lazy.formats.hugging_face.model_directory import WEIGHTS_NAME, ModelDirectory
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.formats.open_checkpoint import open as open_checkpoint
from nvflare_lazy.formats.safetensors._copy import TILE_BYTES, copy_into
from nvflare_lazy.formats.safetensors.header import encode_header
from nvflare_lazy.formats.safetensors.layout import TensorMeta, in_file_order, split_into_shards, to_tensor_metas
from nvflare_lazy.formats.safetensors.shards import INDEX_SUFFIX, SUFFIX, index_path
from nvflare_lazy.remote.url import basename, child, display, is_url, with_suffix
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.strided_source import StridedSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Buffer, Self

    from nvflare_lazy.formats._commit import OnWait
    from nvflare_lazy.formats.atomic_file import AtomicFile
    from nvflare_lazy.formats.safetensors.layout import StateDictMetaItem
    from nvflare_lazy.tensors.byte_source import ByteSource
    from nvflare_lazy.tensors.tensor_file import StoredTensor, TensorFile


#: transformers 4 and accelerate refuse a file that has metadata without it.
FORMAT = {"format": "pt"}
# Each is an open file until all of them are complete.
_MAX_SHARDS = 500
_MEMORY_PART_BYTES = 64 << 20
_STRIDED_TILE_BYTES = 16 << 20


class _Slot(NamedTuple):
    shard: Shard
    stored: StoredTensor
    written: WrittenRanges


class StreamingWriter:
    """A checkpoint being written. Leaving its block commits it; leaving by an exception leaves no trace of it.

    Args:
        path: The target. A sharded checkpoint's files are named after it: `model.safetensors` becomes
            `model-00001-of-00002.safetensors` and so on, and `model.safetensors.index.json`. In a directory, the name
            is `model.safetensors`. A path that ends with a slash is a directory, which is created if it is missing. The
            directory of a file must exist. A URL without the suffix `.safetensors` is a directory.
        state_dict_meta: The tensors that will be written, all of them, in any order.
        metadata: Text to store with them, in addition to `FORMAT`, which does not replace a given `format`.
        max_shard_size: Maximum bytes of tensors in a file; a larger checkpoint is split.
        like: A Hugging Face directory. Its other files are copied next to the weights, and in a directory the weights
            have the same name as there. A path without the suffix `.safetensors` is a directory then.
        fsync: Have the bytes on the disk before the checkpoint appears. Without, a power failure soon after may
            leave the name of a file without content. At a URL it has no effect.
        unfinished_in: A directory for the files until then, in the file system of `path` if that is not a URL. Other
            processes open them there, and write what `record_written` reports. Default: no other process can open them.
        progress: Called with a number of bytes of tensors each time some were written; for a URL, each time some were
            uploaded, by another thread.
        check: Called from time to time by threads that wait for uploads; an exception that it raises ends the wait.

    Example:
        >>> with StreamingWriter("mean.safetensors", [TensorMeta("w", "F32", (1024, 1024))]) as writer:
        ...     writer.write("w", 0, first_tile)
        ...     writer.write("w", len(first_tile), second_tile)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        state_dict_meta: Iterable[StateDictMetaItem],
        *,
        metadata: Mapping[str, str] | None = None,
        max_shard_size: int | str | None = None,
        like: str | os.PathLike[str] | None = None,
        fsync: bool = True,
        unfinished_in: str | None = None,
        progress: Callable[[int], object] | None = None,
        check: Callable[[], object] | None = None,
    ) -> None:
        self._like = None if like is None else ModelDirectory.of(like)
        file = checkpoint_path(path, self._like)
        is_remote = is_url(file)
        self.path = file if is_remote else os.path.realpath(file)
        self._where = display(self.path)
        #: The text in the header of each file.
        self.metadata = {**FORMAT, **(metadata or {})}
        self._slots: dict[str, _Slot] = {}
        self._shards: list[Shard] = []
        self._lock = threading.Lock()
        self._tiles = threading.local()
        self._failure: Exception | None = None
        self._committed = False
        is_directory = not is_remote and file != os.fspath(path)
        self._made_directories = _make_directories(os.path.dirname(self.path)) if is_directory else []
        self._progress = None if is_remote else progress
        self._output: LocalOutput | RemoteOutput
        with ExitStack() as undo:
            undo.callback(self._remove_directories)
            for shard in _shards(self.path, to_tensor_metas(state_dict_meta), max_shard_size):
                self._add_shard(shard)
            if len(self._shards) > 1 and self._like is not None and self._like.is_adapter:
                raise SaveError(f"{self._where} would have shards, which PEFT does not load; omit max_shard_size")
            if is_remote:
                self._output = RemoteOutput(self.path, unfinished_in=unfinished_in, progress=progress, check=check)
            else:
                self._output = LocalOutput(self.path, fsync=fsync, unfinished_in=unfinished_in)
            undo.callback(self.abort)
            self._output.start(self._shards)
            undo.pop_all()

    def _add_shard(self, state_dict_meta: Sequence[TensorMeta]) -> None:
        header, contents = encode_header(in_file_order(state_dict_meta), self.metadata, where=self._where)
        shard = Shard(len(self._shards), header, contents, missing=sum(stored.nbytes for stored in contents.values()))
        self._shards.append(shard)
        for name, stored in contents.items():
            if name in self._slots:
                raise MetadataMismatchError(f"{self._where}: tensor {quoted(name)} is promised twice")
            self._slots[name] = _Slot(shard, stored, WrittenRanges(stored.nbytes))

    def write(self, name: str, offset: int, data: Buffer) -> None:
        """Write some bytes of a tensor.

        Args:
            name: Which tensor.
            offset: Where they go, counted in bytes from its beginning.
            data: The bytes, row-major and little-endian.
        """
        view = memoryview(data).cast("B")
        try:
            slot = self._slot(name, offset, offset + len(view))
            if view:
                self._file(slot.shard).write_at(view, slot.stored.offset + offset)
            self._record_written(name, slot, offset, offset + len(view))
        except Exception as error:
            # The same as `_record_failure`, whose generator would be run for every tile of an aggregation.
            self._failure = error
            raise

    def position(self, name: str) -> int:
        """Return where in its file the first byte of a tensor goes."""
        return self._slot(name, 0, 0).stored.offset

    def unfinished_path(self, name: str) -> str:
        """Return the path of the unfinished file that contains a tensor."""
        return self._file(self._slot(name, 0, 0).shard).unfinished_path

    def record_written(self, name: str, begin: int, end: int) -> None:
        """Record that another process has written these bytes of a tensor."""
        with self._record_failure():
            self._record_written(name, self._slot(name, begin, end), begin, end)

    def copy(self, name: str, source: ByteSource) -> None:
        """Write a whole tensor from where its bytes are, a tile at a time.

        Args:
            name: Which tensor.
            source: Its bytes, row-major and little-endian.
        """
        with self._record_failure():
            slot = self._slot(name, 0, source.nbytes)
            written = partial(self._record_written, name, slot)
            if isinstance(source, MemorySource):
                for begin in range(0, source.nbytes, _MEMORY_PART_BYTES):
                    part = source.view[begin : begin + _MEMORY_PART_BYTES]
                    self._file(slot.shard).write_at(part, slot.stored.offset + begin)
                    written(begin, begin + len(part))
            elif source.nbytes:
                copy_into(self._file(slot.shard), slot.stored.offset, source, self._tile(source), written)

    @property
    def checkpoint_path(self) -> Path | str:
        """What to open after the commit: the file, or the index of the shards; a string if it is a URL."""
        if is_url(self.path):
            return self.path if len(self._shards) == 1 else with_suffix(self.path, INDEX_SUFFIX)
        return Path(self.path if len(self._shards) == 1 else index_path(self.path))

    def commit(self, on_wait: OnWait | None = None) -> list[TensorFile]:
        """Publish the checkpoint, once all of its bytes are there and on the disk, or at the URL.

        Args:
            on_wait: Called from time to time in this thread while files are uploaded, with the bytes that are and
                those of all files. An exception that it raises cancels the commit.

        Returns:
            The files, open, with their contents; none for a URL.
        """
        try:
            self._check_complete()
            files = self._output.publish(self._shards, self._like, on_wait)
            self._committed = True
            return files
        finally:
            self.abort()

    def commit_and_open(self, on_wait: OnWait | None = None) -> LazyTensorDict:
        """Publish the checkpoint as `commit` does, and open it."""
        files = self.commit(on_wait)
        if is_url(self.path):
            return open_checkpoint(str(self.checkpoint_path))
        return LazyTensorDict.from_files(files, metadata=self.metadata)

    def abort(self) -> None:
        """Remove the written data. Does nothing after a commit, or a second time."""
        self._output.abort()
        for shard in self._shards:
            if shard.file is not None:
                shard.file.close()
        self._remove_directories()

    def _remove_directories(self) -> None:
        if not self._committed:
            for directory in self._made_directories:
                with suppress(OSError):
                    os.rmdir(directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
        elif not self._committed:
            self.commit()

    @contextmanager
    def _record_failure(self) -> Iterator[None]:
        """Prevent a commit after a failure, even if the failed thread does not report it."""
        try:
            yield
        except Exception as error:
            self._failure = error
            raise

    def _slot(self, name: str, begin: int, end: int) -> _Slot:
        slot = self._slots.get(name)
        if slot is None:
            raise MetadataMismatchError(f"{self._where}: tensor {quoted(name)} was not promised")
        if begin < 0 or end > slot.stored.nbytes:
            raise MetadataMismatchError(
                f"{self._where}: tensor {quoted(name)} has {slot.stored.nbytes} bytes as promised, not {begin} to {end}"
            )
        return slot

    def _file(self, shard: Shard) -> AtomicFile:
        if shard.file is None:
            with shard.lock:
                if shard.file is None:
                    shard.file = self._output.new_file(shard)
        return shard.file

    def _record_written(self, name: str, slot: _Slot, begin: int, end: int) -> None:
        with self._lock:
            is_new = slot.written.add(begin, end)
            slot.shard.missing -= end - begin
            is_complete = slot.shard.missing == 0 and begin < end
        if not is_new:
            raise MetadataMismatchError(f"{self._where}: bytes {begin} to {end} of {quoted(name)} were written twice")
        if is_complete:
            self._output.complete(slot.shard)
        if self._progress is not None:
            self._progress(end - begin)

    def _check_complete(self) -> None:
        if self._failure is not None:
            raise self._failure
        for name, slot in self._slots.items():
            gap = slot.written.first_gap
            if gap == (0, slot.stored.nbytes):
                raise MetadataMismatchError(f"{self._where}: tensor {quoted(name)} was promised and never written")
            if gap is not None:
                raise MetadataMismatchError(
                    f"{self._where}: bytes {gap[0]} to {gap[1]} of tensor {quoted(name)} were never written"
                )

    def _tile(self, source: ByteSource) -> memoryview:
        if isinstance(source, StridedSource):
            # A tile of a transposed tensor is read from all over it: the fewer tiles, the fewer times it is read.
            return memoryview(mmap.mmap(-1, _STRIDED_TILE_BYTES))
        tile: memoryview | None = getattr(self._tiles, "tile", None)
        if tile is None:
            tile = self._tiles.tile = memoryview(mmap.mmap(-1, TILE_BYTES))
        return tile


def checkpoint_path(path: str | os.PathLike[str], like: ModelDirectory | None = None) -> str:
    """Return the file that `path` means: itself, or the weights in a directory."""
    path = os.fspath(path)
    weights_name = WEIGHTS_NAME if like is None else like.weights_name
    if is_url(path):
        return path if basename(path).endswith(SUFFIX) and not path.endswith("/") else child(path, weights_name)
    is_directory = os.path.isdir(path) or path.endswith(os.sep) or (like is not None and not path.endswith(SUFFIX))
    return os.path.join(path, weights_name) if is_directory else path


def staging_path(path: str | os.PathLike[str], like: str | os.PathLike[str] | None = None) -> str:
    """Return the path next to which `unfinished_in` can be: the checkpoint, or a path in scratch for a URL."""
    file = checkpoint_path(path, None if like is None else ModelDirectory.of(like))
    return os.path.join(scratch_directory(), basename(file)) if is_url(file) else os.path.realpath(file)


def _make_directories(path: str) -> list[str]:
    """Create a directory and return the new directories, the innermost first."""
    missing = []
    parent = path
    while not os.path.isdir(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    for directory in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(directory)
        if not os.path.isdir(directory):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
    return missing


def _shards(
    path: str, state_dict_meta: Sequence[TensorMeta], max_shard_size: int | str | None
) -> list[list[TensorMeta]]:
    most = None if max_shard_size is None else parse_size(max_shard_size)
    if most is None or sum(meta.nbytes for meta in state_dict_meta) <= most:
        return [list(state_dict_meta)]
    shards = split_into_shards(state_dict_meta, most)
    if len(shards) > _MAX_SHARDS:
        raise SaveError(
            f"{display(path)} would have {len(shards)} shards, of which {_MAX_SHARDS} are possible; "
            f"choose a max_shard_size of more than {max_shard_size}"
        )
    return shards


class WrittenRanges:
    """The written parts of `nbytes` bytes, merged where they touch. Callers hold a lock."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._ranges: list[tuple[int, int]] = []

    def add(self, begin: int, end: int) -> bool:
        """Note that a range was written; return False if some of it had been written before."""
        if begin == end:
            return True
        index = bisect_left(self._ranges, (begin, end))
        if index < len(self._ranges) and self._ranges[index][0] < end:
            return False
        if index and self._ranges[index - 1][1] > begin:
            return False
        if index < len(self._ranges) and self._ranges[index][0] == end:
            end = self._ranges.pop(index)[1]
        if index and self._ranges[index - 1][1] == begin:
            begin = self._ranges.pop(index - 1)[0]
        insort(self._ranges, (begin, end))
        return True

    @property
    def first_gap(self) -> tuple[int, int] | None:
        """The first missing range, or None if nothing is missing."""
        begin, end = 0, self._nbytes
        if self._ranges:
            first = self._ranges[0]
            if first[0] == 0:
                begin = first[1]
                end = self._ranges[1][0] if len(self._ranges) > 1 else self._nbytes
            else:
                end = first[0]
        return (begin, end) if begin < end else None
