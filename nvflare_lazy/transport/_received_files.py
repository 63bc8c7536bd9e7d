# SPDX-License-Identifier: Apache-2.0
"""Received tensors on disk: a few safetensors files, each valid on its own.

If the sender lists all shapes first, the headers are exact and segments are written in any order. If tensors arrive one
by one, each shard reserves room for its header, and the next shard reserves more; a file is valid after each tensor.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from nvflare_lazy.errors import ProtocolError
from nvflare_lazy.formats.safetensors.header import GrowingHeader, encode_header, pad_header
from nvflare_lazy.tensors.tensor_file import FileSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from nvflare_lazy.tensors.tensor_file import TensorFile
    from nvflare_lazy.transport._backends import ArrayBackend
    from nvflare_lazy.transport.segments.manifest import Manifest, ManifestItem

# Of all usual file systems.
_BLOCK_BYTES = 4096
# A header of this many names takes some six megabytes; one with long names gets fewer of them, since JSON may spell
# each byte of a name with six characters.
_MAX_NAMES_PER_FILE = 65_536
_MAX_HEADER_BYTES = 16 << 20
# Room for some seven hundred names; each further shard has four times as much, so that 20,000 need four shards.
_FIRST_HEADER_ROOM = 64 << 10
_MAX_HEADER_ROOM = 4 << 20
_HEADER_ENTRY_BYTES = 160


class WritableFile(Protocol):
    """A new file, written from many threads."""

    @property
    def path(self) -> Path:
        """Where it is."""

    def pwrite(self, buffer: Any, offset: int) -> int:
        """Write all of a buffer at an offset."""

    def preallocate(self, nbytes: int) -> None:
        """Reserve space for a file of `nbytes` bytes."""

    def release_tail(self, end: int) -> None:
        """Release the space beyond an offset, where nothing was written; later writes reserve theirs."""

    def finish(self) -> TensorFile:
        """Close the file and return it open for reading."""

    def close(self) -> None:
        """Close the file, complete or not."""


class ReceiveDirectory(Protocol):
    """The directory of one download; the tensors read from its files keep it alive."""

    def new_file(self, suffix: str = ".safetensors") -> WritableFile:
        """Create a file; its name is never taken from outside."""

    def release(self) -> None:
        """Remove everything in it, at once."""


class PreallocatedShards:
    """Files for tensors of known names and shapes: bytes may arrive in any order and from many threads.

    Attributes:
        files: The files, in the order of their bytes.
        locations: For each name, the path of its file and its name there. Complete after `finish()`.
    """

    def __init__(
        self, manifest: Manifest, backend: ArrayBackend, directory: ReceiveDirectory, copied_from: int | None = None
    ) -> None:
        self.locations: dict[str, tuple[str, str]] = {}
        self._manifest = manifest
        self._backend = backend
        self.files: list[WritableFile] = []
        self._starts: list[int] = []  # where each file's data begins in the run of all bytes
        self._data_at: list[int] = []  # where it begins in the file
        try:
            for group in _groups(manifest.stored()):
                self._add_file(group, directory, copied_from if group[0].offset == 0 else None)
        except BaseException:
            self.close()
            raise

    def _add_file(self, group: list[ManifestItem], directory: ReceiveDirectory, copied_from: int | None) -> None:
        start = group[0].offset
        header, _ = encode_header(
            ((item.name, *_in_format(self._backend, item.dtype, item.shape, item.nbytes)) for item in group),
            where="the received tensors",
        )
        if copied_from is not None and copied_from % 8 == 0:  # as the data of each file is
            header = pad_header(header, (copied_from - len(header)) % _BLOCK_BYTES)
        file = directory.new_file()
        self.files.append(file)
        self._starts.append(start)
        self._data_at.append(len(header))
        file.preallocate(len(header) + group[-1].offset + group[-1].nbytes - start)
        file.pwrite(header, 0)

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes of the run of all bytes."""
        index = bisect_right(self._starts, offset) - 1
        while data:
            end = self._starts[index + 1] if index + 1 < len(self._starts) else self._manifest.nbytes
            part = data[: end - offset]
            if part:
                self.files[index].pwrite(part, self._data_at[index] + offset - self._starts[index])
            data, offset, index = data[len(part) :], offset + len(part), index + 1

    def release_rest(self, offset: int) -> None:
        """Release the space for bytes at or after an offset; see `Sink`."""
        for file, start, data_at in zip(self.files, self._starts, self._data_at, strict=True):
            file.release_tail(data_at + max(0, offset - start))

    def place(self, offset: int) -> tuple[int, int]:
        """Return which file contains the byte at an offset of the run of all bytes, and where."""
        index = max(bisect_right(self._starts, offset) - 1, 0)
        return index, self._data_at[index] + offset - self._starts[index]

    def finish_files(self) -> list[TensorFile]:
        """Complete the files and return them open for reading."""
        return [file.finish() for file in self.files]

    def finish(self) -> dict[str, Any]:
        """Complete the files and return the lazy values by name."""
        files = self.finish_files()
        names: dict[int, str] = {}
        received = {}
        for item in self._manifest.items:
            index, at = self.place(item.offset)
            if not item.alias:
                names[item.offset] = item.name
            source = FileSource(files[index], at, item.nbytes)
            received[item.name] = self._backend.lazy(source, item.dtype, item.shape)
            self.locations[item.name] = files[index].path, names[item.offset] if item.alias else item.name
        return received

    def close(self) -> None:
        """Close the files without completing them."""
        for file in self.files:
            file.close()


class AppendingShards:
    """Files for tensors that arrive one by one, each whole, in unknown number.

    Args:
        manifest: The tensors.
        backend: What makes them.
        directory: Where the files go.
        copied_from: The position in another file of the bytes that are copied to the first file, which has them at the
            same position within a block: then file systems can share the blocks. Default: they are not copied.

    Attributes:
        locations: For each name, the path of its file and its name there.
    """

    def __init__(self, backend: ArrayBackend, directory: ReceiveDirectory) -> None:
        self.locations: dict[str, tuple[str, str]] = {}
        self._backend = backend
        self._folder = directory
        self._lock = threading.Lock()
        self._shard: _OpenShard | None = None
        self._room = _FIRST_HEADER_ROOM
        self._received: dict[str, Any] = {}

    def append(self, name: str, dtype: Any, shape: tuple[int, ...], data: memoryview) -> None:
        """Write one tensor.

        Raises:
            ProtocolError: If there was one of that name already.
        """
        with self._lock:
            if name in self.locations:
                raise ProtocolError(f"duplicate tensor {name!r}; the sender must send each tensor one time")
            header_bytes = _header_bytes(name, shape)
            if self._shard is None or not self._shard.has_room(header_bytes):
                if self._shard is not None:
                    self._received.update(self._shard.finish(self._backend))
                    self._room = min(4 * self._room, _MAX_HEADER_ROOM)
                self._shard = _OpenShard(self._folder.new_file(), max(self._room, 2 * header_bytes))
            self._shard.append(self._backend, name, dtype, shape, data, header_bytes)
            self.locations[name] = str(self._shard.file.path), name

    def finish(self) -> dict[str, Any]:
        """Complete the last file and return the lazy values by name."""
        with self._lock:
            if self._shard is not None:
                self._received.update(self._shard.finish(self._backend))
                self._shard = None
            return self._received

    def close(self) -> None:
        """Close the last file without completing it."""
        with self._lock:
            if self._shard is not None:
                self._shard.file.close()
                self._shard = None


class _OpenShard:
    def __init__(self, file: WritableFile, room: int) -> None:
        self.file = file
        self._room = room
        self._taken = 0
        self._end = room
        self._header = GrowingHeader(room, "the received tensors")
        self.file.pwrite(self._header.empty, 0)
        self._tensors: list[tuple[str, Any, tuple[int, ...], int, int]] = []

    def has_room(self, header_bytes: int) -> bool:
        return self._taken + header_bytes + 64 <= self._room

    def append(
        self, backend: ArrayBackend, name: str, dtype: Any, shape: tuple[int, ...], data: memoryview, header_bytes: int
    ) -> None:
        if len(data):
            self.file.pwrite(data, self._end)
        self.file.pwrite(*self._header.append(name, *_in_format(backend, dtype, shape, len(data))))
        self._tensors.append((name, dtype, shape, self._end, len(data)))
        self._end += len(data)
        self._taken += header_bytes

    def finish(self, backend: ArrayBackend) -> dict[str, Any]:
        file = self.file.finish()
        return {
            name: backend.lazy(FileSource(file, at, nbytes), dtype, shape)
            for name, dtype, shape, at, nbytes in self._tensors
        }


def _header_bytes(name: str, shape: tuple[int, ...]) -> int:
    return _HEADER_ENTRY_BYTES + 6 * len(name) + 20 * len(shape)


def _groups(items: Iterable[ManifestItem]) -> Iterator[list[ManifestItem]]:
    """Split items into those of one file each."""
    group: list[ManifestItem] = []
    nbytes = 0
    for item in items:
        more = _header_bytes(item.name, item.shape)
        if group and (len(group) == _MAX_NAMES_PER_FILE or nbytes + more > _MAX_HEADER_BYTES):
            yield group
            group, nbytes = [], 0
        group.append(item)
        nbytes += more
    if group:
        yield group


def _in_format(backend: ArrayBackend, dtype: Any, shape: tuple[int, ...], nbytes: int) -> tuple[str, tuple[int, ...]]:
    """Name a tensor as the format does; one that it has no name for is stored as its plain bytes."""
    name = backend.format_name(dtype)
    if name is None or prod(shape) * dtype.itemsize != nbytes:
        return "U8", (nbytes,)
    return name, shape
