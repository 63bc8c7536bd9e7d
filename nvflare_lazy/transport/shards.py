# SPDX-License-Identifier: Apache-2.0
"""Where received tensors are put on disk: few safetensors files, each valid on its own, whatever arrives how.

If the sender told all shapes beforehand the headers are exact and segments are written where they belong, in any
order. If tensors come one by one a shard keeps room for its header, and the next shard keeps more.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nvflare_lazy.errors import ProtocolError
from nvflare_lazy.formats.safetensors_header import encode_header
from nvflare_lazy.tensors.tensor_file import FileSource, TensorFile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvflare_lazy.transport._backends import Family
    from nvflare_lazy.transport.segments.manifest import Item, Manifest

# A header of this many names takes some six megabytes.
_MOST_NAMES_A_FILE = 65_536
# Room for some seven hundred names; each further shard has four times as much, so that 20,000 need four shards.
_FIRST_HEADER_ROOM = 64 << 10
_MOST_HEADER_ROOM = 4 << 20
_HEADER_ENTRY_BYTES = 160


class WritableFile(Protocol):
    """A new file, written from many threads."""

    def pwrite(self, buffer: Any, offset: int) -> int:
        """Write all of a buffer at an offset."""

    def preallocate(self, nbytes: int) -> None:
        """Set aside room for a file of so many bytes."""

    def finish(self) -> TensorFile:
        """Close the file and return it open for reading."""

    def close(self) -> None:
        """Close the file whatever is in it."""


class Folder(Protocol):
    """Where the files of one download go; the tensors read from them keep it alive."""

    def new_file(self, suffix: str = ".safetensors") -> WritableFile:
        """Create a file; its name is never taken from outside."""

    def release(self) -> None:
        """Remove everything in it, at once."""


class Placed(NamedTuple):
    """A tensor that was written: what it is, and where."""

    path: str
    name: str
    dtype: Any
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class ExactShards:
    """Files for tensors whose names and shapes are known: bytes may come in any order and from many threads."""

    def __init__(self, manifest: Manifest, family: Family, folder: Folder) -> None:
        self._manifest = manifest
        self._files: list[WritableFile] = []
        self._starts: list[int] = []  # where each file's data begins in the run of all bytes
        self._data_at: list[int] = []  # where it begins in the file
        owners = manifest.owners()
        try:
            while group := list(islice(owners, _MOST_NAMES_A_FILE)):
                self._add_file(group, family, folder)
        except BaseException:
            self.close()
            raise

    def _add_file(self, group: list[Item], family: Family, folder: Folder) -> None:
        start = group[0].offset
        header, _ = encode_header(
            ((item.name, *_in_format(family, item.dtype, item.shape, item.nbytes)) for item in group),
            where="the received tensors",
        )
        file = folder.new_file()
        self._files.append(file)
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
                self._files[index].pwrite(part, self._data_at[index] + offset - self._starts[index])
            data, offset, index = data[len(part) :], offset + len(part), index + 1

    def finish(self) -> dict[str, Placed]:
        """Close the files and say where each tensor is."""
        paths = [file.finish().path for file in self._files]
        names: dict[int, str] = {}
        placed = {}
        for item in self._manifest.items:
            index = max(bisect_right(self._starts, item.offset) - 1, 0)
            if not item.alias:
                names[item.offset] = item.name
            at = self._data_at[index] + item.offset - self._starts[index]
            name = names[item.offset] if item.alias else item.name
            placed[item.name] = Placed(paths[index], name, item.dtype, item.shape, at, item.nbytes)
        return placed

    def close(self) -> None:
        """Close the files without finishing them."""
        for file in self._files:
            file.close()


class RollingShards:
    """Files for tensors that come one by one, each whole, nobody knows how many."""

    def __init__(self, family: Family, folder: Folder) -> None:
        self._family = family
        self._folder = folder
        self._lock = threading.Lock()
        self._shard: _OpenShard | None = None
        self._room = _FIRST_HEADER_ROOM
        self.placed: dict[str, Placed] = {}

    def append(self, name: str, dtype: Any, shape: tuple[int, ...], data: memoryview) -> Placed:
        """Write one tensor.

        Raises:
            ProtocolError: If there was one of that name already.
        """
        with self._lock:
            if name in self.placed:
                raise ProtocolError(f"the tensor {name!r} came twice; the sender has to send each once")
            header_bytes = _HEADER_ENTRY_BYTES + 6 * len(name) + 20 * len(shape)
            if self._shard is None or not self._shard.has_room(header_bytes):
                if self._shard is not None:
                    self._shard.finish()
                    self._room = min(4 * self._room, _MOST_HEADER_ROOM)
                self._shard = _OpenShard(self._folder.new_file(), max(self._room, 2 * header_bytes))
            placed = self._shard.append(self._family, name, dtype, shape, data, header_bytes)
            self.placed[name] = placed
            return placed

    def finish(self) -> dict[str, Placed]:
        """Complete the last file and say where each tensor is."""
        with self._lock:
            if self._shard is not None:
                self._shard.finish()
                self._shard = None
            return self.placed

    def close(self) -> None:
        """Close the last file without finishing it."""
        with self._lock:
            if self._shard is not None:
                self._shard.file.close()
                self._shard = None


class _OpenShard:
    def __init__(self, file: WritableFile, room: int) -> None:
        self.file = file
        self._room = room
        self._taken = 0
        self._end = 0
        self._entries: list[tuple[str, str, tuple[int, ...]]] = []
        self._path = str(getattr(file, "path", ""))

    def has_room(self, header_bytes: int) -> bool:
        return self._taken + header_bytes + 64 <= self._room

    def append(
        self, family: Family, name: str, dtype: Any, shape: tuple[int, ...], data: memoryview, header_bytes: int
    ) -> Placed:
        at = self._room + self._end
        if len(data):
            self.file.pwrite(data, at)
        self._entries.append((name, *_in_format(family, dtype, shape, len(data))))
        self._end += len(data)
        self._taken += header_bytes
        return Placed(self._path, name, dtype, shape, at, len(data))

    def finish(self) -> None:
        header, _ = encode_header(self._entries, where="the received tensors", room=self._room)
        self.file.pwrite(header, 0)
        self.file.finish()


def open_placed(placed: Mapping[str, Placed]) -> dict[str, FileSource]:
    """Open the files and return the bytes of each tensor."""
    files: dict[str, TensorFile] = {}
    sources = {}
    for name, place in placed.items():
        file = files.get(place.path)
        if file is None:
            files[place.path] = file = TensorFile(place.path)
        sources[name] = FileSource(file, place.offset, place.nbytes)
    return sources


def _in_format(family: Family, dtype: Any, shape: tuple[int, ...], nbytes: int) -> tuple[str, tuple[int, ...]]:
    """Name a tensor as the format does; one that it has no name for is stored as its plain bytes."""
    name = family.format_name(dtype)
    if name is None or prod(shape) * dtype.itemsize != nbytes:
        return "U8", (nbytes,)
    return name, shape
