# SPDX-License-Identifier: Apache-2.0
"""`TarSource`: the storages of a checkpoint of PyTorch before 0.1.10.

A tar archive whose members are the storages, the geometry of the tensors, and a pickle that refers to both by number.
`tarfile` finds the members by offset; nothing is unpacked.
"""

from __future__ import annotations

import struct
import sys
import tarfile
from typing import TYPE_CHECKING, NamedTuple

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import ArchiveError, NVFlareLazyError, PyTorchCheckpointError
from nvflare_lazy.formats.pytorch._pickle import StorageRef, TensorView, storage_dtype, unpickle
from nvflare_lazy.formats.pytorch._stream import PickleStream
from nvflare_lazy.formats.pytorch.data_source import LazyDataSource

if TYPE_CHECKING:
    import os

    from nvflare_lazy.tensors.byte_source import ByteSource
    from nvflare_lazy.tensors.tensor_file import OpenFile

_MEMBERS = ("storages", "tensors", "pickle")
_MAX_DIMENSIONS = 64
# A row of the tables; behind it lies a storage, which is skipped.
_READ_AHEAD = 256


class TarSource(LazyDataSource):
    """A tar checkpoint.

    Args:
        path: The file.
        file: The same file if it is open already.
    """

    def __init__(self, path: str | os.PathLike[str], file: OpenFile | None = None) -> None:
        super().__init__(path, file)
        members = read_members(self.file)
        if not members.keys() >= set(_MEMBERS):
            some = ", ".join(quoted(name) for name in list(members)[:3])
            raise ArchiveError(
                f"{self.path} is a tar archive, but no PyTorch checkpoint; it has {some or 'nothing in it'}"
            )
        streams = {
            name: PickleStream(self.file, member.offset, member.offset + member.nbytes, _READ_AHEAD)
            for name, member in members.items()
        }
        self.swapped = sys.byteorder != "little"
        self._storages: dict[str, ByteSource] = {}
        self._objects: dict[int, StorageRef | TensorView] = {}
        try:
            self._read_storages(streams["storages"])
            self._read_tensors(streams["tensors"])
        except (RuntimeError, ValueError) as error:
            if isinstance(error, NVFlareLazyError):
                raise
            raise self._damaged(f"tables ({str(error)[:200]})") from None
        self.content = self._unpickle(streams["pickle"])
        self.spend = streams["pickle"].spend

    def keys(self) -> list[str]:
        return list(self._storages)

    def _storage(self, key: str) -> ByteSource | None:
        return self._storages.get(key.rpartition("/")[2])

    def _unpickle(self, stream: PickleStream) -> object:
        return unpickle(stream, self._load_id)

    def _load_id(self, persistent_id: object) -> object:
        if type(persistent_id) not in (int, str, bytes):
            raise ValueError("the id of a tensor is not a number")
        found = self._objects.get(int(persistent_id))  # type: ignore[call-overload]
        if found is None:
            raise ValueError("nothing has the number of that tensor")
        return found

    def _read_storages(self, stream: PickleStream) -> None:
        for _ in range(self._count(stream)):
            number, _, storage_type = self._row(stream, 3)
            number = self._number(number)
            dtype = storage_dtype(storage_type)
            nbytes = int.from_bytes(stream.read(8), "little", signed=True) * dtype.itemsize
            key = str(number)
            self._storages[key] = self.file.source(stream.position, self._within(stream, nbytes))
            self._objects[number] = StorageRef(key, dtype, 0, nbytes, nbytes)
            stream.skip(nbytes)
        views = self._unpickle(stream)
        if type(views) is not list:
            raise self._damaged("views of storages")
        for view in views:
            self._add_view(view)

    def _add_view(self, view: object) -> None:
        if type(view) is not tuple or len(view) != 4 or not all(type(part) is int for part in view):
            raise self._damaged("views of storages")
        number, root_number, offset, numel = self._number(view[0]), *view[1:]
        root = self._objects.get(root_number)
        if type(root) is not StorageRef:
            raise self._damaged("views of storages")
        width = root.dtype.itemsize
        if min(offset, numel) < 0 or (offset + numel) * width > root.nbytes:
            raise PyTorchCheckpointError(
                f"{self.path} has a storage that is larger than the one it is a part of; it is damaged"
            )
        self._objects[number] = StorageRef(
            root.key, root.dtype, root.offset + offset * width, numel * width, root.total
        )

    def _read_tensors(self, stream: PickleStream) -> None:
        for _ in range(self._count(stream)):
            number, storage_number, _ = self._row(stream, 3)
            number = self._number(number)
            storage = self._objects.get(storage_number) if type(storage_number) is int else None
            if type(storage) is not StorageRef:
                raise self._damaged("tensors")
            # Twice the width of the number itself: the writer took it for a 64-bit one.
            dimensions = int.from_bytes(stream.read(8)[:4], "little", signed=True)
            if not 0 <= dimensions <= _MAX_DIMENSIONS:
                raise self._damaged("tensors")
            numbers = struct.unpack(f"<{2 * dimensions + 1}q", stream.read(8 * (2 * dimensions + 1)))
            self._objects[number] = TensorView(
                storage, storage.dtype, numbers[:dimensions], numbers[dimensions:-1], numbers[-1]
            )

    def _number(self, number: object) -> int:
        """Return the number of a new object, which is an address in the process that wrote it."""
        if type(number) is not int or not 0 <= number < 1 << 64 or number in self._objects:
            raise self._damaged("numbers")
        return number

    def _count(self, stream: PickleStream) -> int:
        count = self._unpickle(stream)
        if type(count) is not int or count < 0:
            raise self._damaged("counts")
        return count

    def _row(self, stream: PickleStream, width: int) -> tuple[object, ...]:
        row = self._unpickle(stream)
        if type(row) is not tuple or len(row) != width:
            raise self._damaged("tables")
        return row

    def _within(self, stream: PickleStream, nbytes: int) -> int:
        if nbytes < 0 or stream.position + nbytes > self.file.size:
            raise PyTorchCheckpointError(f"{self.path} ends before its storages do: it was cut short; get it again")
        return nbytes

    def _damaged(self, what: str) -> PyTorchCheckpointError:
        return PyTorchCheckpointError(f"{self.path}: its {what} are not as PyTorch writes them; it is damaged")


BLOCK = tarfile.BLOCKSIZE
# A checkpoint has four members, with at most two headers each.
_MAX_MEMBERS = 64
_MAX_HEADER_BYTES = 128 << 10


class TarMember(NamedTuple):
    """Where the bytes of a member are in the file."""

    offset: int
    nbytes: int


def is_tar_header(block: bytes) -> bool:
    """Whether a block is the header of a member: its checksum is right."""
    try:
        tarfile.TarInfo.frombuf(block[:BLOCK], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def read_members(file: OpenFile) -> dict[str, TarMember]:
    """Return the files in an archive by name."""
    members: dict[str, TarMember] = {}
    try:
        for member in tarfile.TarFile(fileobj=_Headers(file)):  # type: ignore[arg-type]
            if not member.isreg() or member.issparse():
                raise ArchiveError(
                    f"{file.path} is a tar archive with links, directories or holes, and no PyTorch checkpoint"
                )
            if member.name in members:
                raise ArchiveError(f"{file.path} has two members called {quoted(member.name)}; do not use it")
            if member.size > file.size - member.offset_data or len(members) == _MAX_MEMBERS:
                raise ArchiveError(
                    f"{file.path} is a tar archive that was cut short, or has too many members; get it again"
                )
            members[member.name] = TarMember(member.offset_data, member.size)
    except (tarfile.TarError, ValueError, OverflowError) as error:
        if isinstance(error, ArchiveError):
            raise
        raise ArchiveError(
            f"{file.path} starts like a tar archive, but is damaged or cut short ({error}); get it again"
        ) from None
    return members


class _Headers:
    """A tar archive as far as `tarfile` has to read it."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self._at = 0
        self._left = _MAX_HEADER_BYTES

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int) -> None:
        self._at = offset

    def read(self, count: int) -> bytes:
        count = max(min(count, self._file.size - self._at), 0)
        self._left -= count
        if self._left < 0:
            raise ArchiveError(
                f"{self._file.path} is a tar archive with more than {_MAX_HEADER_BYTES} bytes of headers; it is forged"
            )
        data = bytearray(count)
        self._file.read_into(memoryview(data), self._at)
        self._at += count
        return bytes(data)
