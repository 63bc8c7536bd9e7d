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
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nvflare_lazy._text import parse_size, quoted
from nvflare_lazy.errors import MetadataMismatchError, SaveError
from nvflare_lazy.formats._commit import publish_file, publish_shards
from nvflare_lazy.formats.atomic_file import AtomicFile
from nvflare_lazy.formats.hugging_face.model_directory import WEIGHTS_NAME, ModelDirectory
from nvflare_lazy.formats.safetensors._copy import TILE_BYTES, copy_into
from nvflare_lazy.formats.safetensors.header import encode_header, end_of
from nvflare_lazy.formats.safetensors.layout import TensorMeta, in_file_order, split_into_shards, to_tensor_metas
from nvflare_lazy.formats.safetensors.shards import SUFFIX, index_path
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.strided_source import StridedSource
from nvflare_lazy.tensors.tensor_file import TensorFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Buffer, Self

    from nvflare_lazy.formats.safetensors.layout import StateDictMetaItem
    from nvflare_lazy.tensors.byte_source import ByteSource
    from nvflare_lazy.tensors.tensor_file import StoredTensor


#: transformers 4 and accelerate refuse a file that has metadata without it.
FORMAT = {"format": "pt"}
# Each is an open file until all of them are complete.
_MAX_SHARDS = 500
_MEMORY_PART_BYTES = 64 << 20
_STRIDED_TILE_BYTES = 16 << 20


class _Slot(NamedTuple):
    file: AtomicFile
    stored: StoredTensor
    written: WrittenRanges


class StreamingWriter:
    """A checkpoint being written. Leaving its block commits it; leaving by an exception leaves no trace of it.

    Args:
        path: Where it will appear. A sharded checkpoint's files are named after it: `model.safetensors` becomes
            `model-00001-of-00002.safetensors` and so on, and `model.safetensors.index.json`. In a directory, the
            name is `model.safetensors`. A path that ends with a slash is a directory, which is created
            if it is missing. The directory of a file must exist.
        state_dict_meta: The tensors that will be written, all of them, in any order.
        metadata: Text to store with them, in addition to `FORMAT`, which does not replace a given `format`.
        max_shard_size: Split what is larger into files of at most so many bytes of tensors each.
        like: A Hugging Face directory. The files that belong next to its weights are copied next to these, and in a
            directory the name is that of its weights. A path without the suffix `.safetensors` is a directory then.
        fsync: Have the bytes on the disk before the checkpoint appears. Without, a power failure soon after may
            leave the name of a file without content.

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
    ) -> None:
        self._like = None if like is None else ModelDirectory.of(like)
        file = checkpoint_path(path, self._like)
        self.path = os.path.realpath(file)
        #: The text in the header of each file.
        self.metadata = {**FORMAT, **(metadata or {})}
        self._fsync = fsync
        self._slots: dict[str, _Slot] = {}
        self._shards: list[tuple[AtomicFile, dict[str, StoredTensor]]] = []
        self._lock = threading.Lock()
        self._tiles = threading.local()
        self._failure: Exception | None = None
        self._committed = False
        self._made_directories = [] if file == os.fspath(path) else _make_directories(os.path.dirname(self.path))
        with ExitStack() as undo:
            undo.callback(self.abort)
            shards = _shards(self.path, to_tensor_metas(state_dict_meta), max_shard_size)
            if len(shards) > 1 and self._like is not None and self._like.is_adapter:
                raise SaveError(f"{self.path} would have shards, which PEFT does not load; omit max_shard_size")
            for shard in shards:
                self._start_file(shard)
            undo.pop_all()

    def _start_file(self, state_dict_meta: Sequence[TensorMeta]) -> None:
        header, contents = encode_header(in_file_order(state_dict_meta), self.metadata, where=self.path)
        file = AtomicFile(self.path, fsync=self._fsync)
        self._shards.append((file, contents))
        file.reserve(end_of(contents, len(header)))
        file.write_at(header, 0)
        for name, stored in contents.items():
            if name in self._slots:
                raise MetadataMismatchError(f"{self.path}: tensor {quoted(name)} is promised twice")
            self._slots[name] = _Slot(file, stored, WrittenRanges(stored.nbytes))

    def write(self, name: str, offset: int, data: Buffer) -> None:
        """Write some bytes of a tensor.

        Args:
            name: Which tensor.
            offset: Where they go, counted in bytes from its beginning.
            data: The bytes, row-major and little-endian.
        """
        view = memoryview(data).cast("B")
        with self._record_failure():
            slot = self._slot(name, offset, offset + len(view))
            slot.file.write_at(view, slot.stored.offset + offset)
            self._record_written(name, slot, offset, offset + len(view))

    def copy(self, name: str, source: ByteSource, progress: Callable[[int], object] | None = None) -> None:
        """Write a whole tensor from where its bytes are, a tile at a time.

        Args:
            name: Which tensor.
            source: Its bytes, row-major and little-endian.
            progress: Called with a number of bytes each time some were written.
        """
        with self._record_failure():
            slot = self._slot(name, 0, source.nbytes)

            def written(begin: int, end: int) -> None:
                self._record_written(name, slot, begin, end)
                if progress is not None:
                    progress(end - begin)

            if isinstance(source, MemorySource):
                for begin in range(0, source.nbytes, _MEMORY_PART_BYTES):
                    part = source.view[begin : begin + _MEMORY_PART_BYTES]
                    slot.file.write_at(part, slot.stored.offset + begin)
                    written(begin, begin + len(part))
            else:
                copy_into(slot.file, slot.stored.offset, source, self._tile(source), written)

    @property
    def checkpoint_path(self) -> Path:
        """What to open after the commit: the file, or the index of the shards."""
        return Path(self.path if len(self._shards) == 1 else index_path(self.path))

    def commit(self) -> list[TensorFile]:
        """Publish the checkpoint, once all of its bytes are there and on the disk.

        Returns:
            The files, open, with their contents.
        """
        try:
            self._check_complete()
            if self._like is not None:
                # Before the weights: a directory with weights is complete.
                self._like.copy_companions(os.path.dirname(self.path))
            if len(self._shards) == 1:
                publish_file(self._shards[0][0])
            else:
                publish_shards(self._shards, self.path)
            self._committed = True
            files = []
            for file, contents in self._shards:
                opened = TensorFile(file.path, descriptor=file.duplicate(), contents=contents, shareable=True)
                files.append(opened)
                file.close()
            return files
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove the written data. Does nothing after a commit, or a second time."""
        for file, _ in self._shards:
            file.close()
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
            raise MetadataMismatchError(f"{self.path}: tensor {quoted(name)} was not promised")
        if begin < 0 or end > slot.stored.nbytes:
            raise MetadataMismatchError(
                f"{self.path}: tensor {quoted(name)} has {slot.stored.nbytes} bytes as promised, not {begin} to {end}"
            )
        return slot

    def _record_written(self, name: str, slot: _Slot, begin: int, end: int) -> None:
        with self._lock:
            is_new = slot.written.add(begin, end)
        if not is_new:
            raise MetadataMismatchError(f"{self.path}: bytes {begin} to {end} of {quoted(name)} were written twice")

    def _check_complete(self) -> None:
        if self._failure is not None:
            raise self._failure
        for name, slot in self._slots.items():
            gap = slot.written.first_gap
            if gap == (0, slot.stored.nbytes):
                raise MetadataMismatchError(f"{self.path}: tensor {quoted(name)} was promised and never written")
            if gap is not None:
                raise MetadataMismatchError(
                    f"{self.path}: bytes {gap[0]} to {gap[1]} of tensor {quoted(name)} were never written"
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
    is_directory = os.path.isdir(path) or path.endswith(os.sep) or (like is not None and not path.endswith(SUFFIX))
    return os.path.join(path, WEIGHTS_NAME if like is None else like.weights_name) if is_directory else path


def _make_directories(path: str) -> list[str]:
    """Create a directory and return those that did not exist, the innermost first."""
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
            f"{path} would have {len(shards)} shards, of which {_MAX_SHARDS} are possible; "
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
