# SPDX-License-Identifier: Apache-2.0
"""`ZipSource`: the storages of a checkpoint that `torch.save` has written since PyTorch 1.6.

The archive holds the pickle (`data.pkl`) and one record for each storage, stored as it was in memory. Records are read
by offset. Python's `zipfile` is of no use for that: it requires checksums, which torch may omit, and accepts
archives that two readers would understand in two ways.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import ArchiveError, PyTorchCheckpointError
from nvflare_lazy.formats.pytorch._pickle import storage_ref, unpickle
from nvflare_lazy.formats.pytorch._stream import PickleStream
from nvflare_lazy.formats.pytorch.data_source import LazyDataSource

if TYPE_CHECKING:
    import os

    from nvflare_lazy.tensors.byte_source import ByteSource
    from nvflare_lazy.tensors.tensor_file import OpenFile

_PICKLE = "data.pkl"
_STORAGES = "data/"
_MAX_VERSION = 10
_SHORT_RECORD = 64
# Other formats that are zip archives: a name in the archive, and the format.
_OTHER_KINDS = (
    (".npy", "NumPy arrays (.npz): load them with numpy.load"),
    ("archive_format", "a program of torch.export: load it with torch.export.load"),
    ("model.weights.h5", "a Keras model"),
    ("[Content_Types].xml", "an Office document"),
)


class ZipSource(LazyDataSource):
    """A zip checkpoint.

    Args:
        path: The file.
        file: The same file if it is open already.
    """

    def __init__(self, path: str | os.PathLike[str], file: OpenFile | None = None) -> None:
        super().__init__(path, file)
        if bytes(self.file.source(0, min(2, self.file.size)).read()) != MAGIC[:2]:
            raise ArchiveError(f"{self.path} is not a zip archive; open_pytorch() opens checkpoints of every kind")
        records = self._files = read_directory(self.file)
        root = self._root(records)
        self._root_directory = root
        self._records = {name.removeprefix(root): record for name, record in records.items() if name.startswith(root)}
        self._check_kind()
        self.swapped = self._byte_order() != sys.byteorder
        record = self._records[_PICKLE]
        stream = PickleStream(self.file, record.offset, record.offset + record.nbytes)
        self.content = unpickle(stream, self._load_id)
        self.spend = stream.spend

    def keys(self) -> list[str]:
        return [name.removeprefix(_STORAGES) for name in self._records if name.startswith(_STORAGES)]

    def _storage(self, key: str) -> ByteSource | None:
        record = self._records.get(_STORAGES + key) or self._find_file(key, _STORAGES)
        return None if record is None else self.file.source(record.offset, record.nbytes)

    def _find_file(self, name: str, folder: str = "") -> ZipRecord | None:
        """Return the record of a name, with the root directory of the archive or without, if it is in a folder."""
        name = name.removeprefix(self._root_directory)
        return self._records.get(name) if name.startswith(folder) else None

    def contains(self, key: str) -> bool:
        """Whether there is a storage of this key, or a file of this full name in the archive."""
        return key in self._files or super().contains(key)

    def data_files(self) -> list[str]:
        """Return the full names of the storages in the archive."""
        return [f"{self._root_directory}{_STORAGES}{key}" for key in self.keys()]

    def read_file(self, name: str) -> bytearray:
        """Return all bytes of a file in the archive, such as "model/data.pkl", or of a storage."""
        return self._file(name).read()

    def read_file_range(self, name: str, offset: int, length: int) -> bytearray:
        """Return `length` bytes of a file in the archive, starting at `offset`."""
        return self._file(name).read(offset, length)

    def _file(self, name: str) -> ByteSource:
        record = self._files.get(name)
        return self.storage(name) if record is None else self.file.source(record.offset, record.nbytes)

    def _load_id(self, persistent_id: object) -> object:
        if type(persistent_id) is not tuple or len(persistent_id) != 5 or persistent_id[0] != "storage":
            raise ValueError("the id of a storage is not a tuple of five")
        _, storage_type, key, _, numel = persistent_id
        ref = storage_ref(storage_type, key, numel)
        nbytes = self.storage(ref.key).nbytes
        if ref.total > nbytes:
            raise PyTorchCheckpointError(
                f"{self.path}: storage {quoted(ref.key)} should have {ref.total} bytes, but has {nbytes}: "
                "the file is damaged; get it again"
            )
        return ref

    def _root(self, records: dict[str, ZipRecord]) -> str:
        """Return the root directory of the archive: the name that the file had when it was saved."""
        roots = {name.partition("/")[0] for name in records if name.partition("/")[2] == _PICKLE}
        if len(roots) == 1:
            return f"{roots.pop()}/"
        if roots:
            raise ArchiveError(f"{self.path} holds several checkpoints; unpack it and open one of them")
        for name in records:
            for ending, what in _OTHER_KINDS:
                if name.endswith(ending):
                    raise ArchiveError(f"{self.path} is a zip archive with {what}")
        some = ", ".join(quoted(name) for name in list(records)[:3])
        raise ArchiveError(f"{self.path} is a zip archive, but no PyTorch checkpoint; it has {some or 'nothing in it'}")

    def _check_kind(self) -> None:
        if "constants.pkl" in self._records:
            raise ArchiveError(
                f"{self.path} is a TorchScript program, which is code with tensors in it: where it can do no harm, "
                "load it with torch.jit.load and save its state_dict() with torch.save or as safetensors"
            )
        version = self._short_record(".data/version") or self._short_record("version")
        if not version.strip().isdigit() or not 1 <= int(version) <= _MAX_VERSION:
            raise ArchiveError(
                f"{self.path} has version {quoted(version)} of the format, and 1 to {_MAX_VERSION} are known; "
                "get it again, or update nvflare-lazy"
            )

    def _byte_order(self) -> str:
        """Return the byte order of the storages; files from before it was written down are little-endian."""
        order = self._short_record("byteorder") or b"little"
        if order not in (b"little", b"big"):
            raise ArchiveError(f"{self.path} has byte order {quoted(order)}, which is unknown; the file is damaged")
        return order.decode()

    def _short_record(self, name: str) -> bytes:
        record = self._records.get(name)
        if record is None:
            return b""
        return bytes(self.file.source(record.offset, record.nbytes).read(0, min(record.nbytes, _SHORT_RECORD)))


MAGIC = b"PK\x03\x04"
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
# Each takes several times as much memory as it takes in the file.
_MAX_RECORDS = 1_000_000
_MAX_COMMENT_LEN = 0xFFFF
_ENCRYPTED = 0x0001 | 0x0040 | 0x2000
_ZIP64_FIELD = 1
_IS_DIRECTORY = 0x10


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """Offset and size of a record in the file, and its checksum; 0 if torch did not write one."""

    offset: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    header: int
    nbytes: int
    crc32: int


def read_directory(file: OpenFile) -> dict[str, ZipRecord]:
    """Return the records of an archive by their full names, in the order of its directory."""
    return _Directory(file).records()


class _Directory:
    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self._count, self._size, self._start = self._find()

    def records(self) -> dict[str, ZipRecord]:
        entries = self._entries()
        places = [self._header_range(entry) for entry in entries]
        records: dict[str, ZipRecord] = {}
        for entry, header in zip(entries, self._file.read_ranges(places), strict=True):
            if entry.name in records:
                raise ArchiveError(f"{self._file.path} has two records called {quoted(entry.name)}; do not use it")
            records[entry.name] = ZipRecord(self._data_offset(entry, header), entry.nbytes, entry.crc32)
        self._check_overlaps(entries, records)
        return {name: record for name, record in records.items() if not name.endswith("/")}

    def _find(self) -> tuple[int, int, int]:
        """Return the number of entries, the size and the offset of the central directory."""
        end = self._find_end()
        _, disk, first_disk, here, count, size, start, _ = _END.unpack(self._read(end, _END.size))
        stop = end
        locator = end - _LOCATOR64.size
        if locator >= 0 and self._read(locator, 4) == b"PK\x06\x07":
            _, _, stop, _ = _LOCATOR64.unpack(self._read(locator, _LOCATOR64.size))
            if stop + _END64.size > locator:
                raise self._broken("its 64-bit directory record is not where it should be")
            magic, length, _, _, disk, first_disk, here, count, size, start = _END64.unpack(
                self._read(stop, _END64.size)
            )
            if magic != b"PK\x06\x06" or stop + 12 + length != locator:
                raise self._broken("its 64-bit directory record is broken")
        if disk or first_disk or here != count:
            raise self._broken("it is one part of several")
        if start + size != stop:
            raise self._broken("its directory is not where it should be")
        return count, size, start

    def _find_end(self) -> int:
        """Return the offset of the end record, which a comment of the stated length may follow and nothing else."""
        tail_size = min(self._file.size, _END.size + _MAX_COMMENT_LEN)
        tail = self._read(self._file.size - tail_size, tail_size)
        at = len(tail) - _END.size
        while (at := tail.rfind(b"PK\x05\x06", 0, at + 4)) >= 0:
            if at + _END.size + int.from_bytes(tail[at + 20 : at + 22], "little") == len(tail):
                return self._file.size - tail_size + at
            at -= 1
        raise self._broken("its directory is missing; it was cut short, or something was added at its end")

    def _entries(self) -> list[_Entry]:
        if self._count * _CENTRAL.size > self._size:
            raise self._broken("its directory is shorter than its entries")
        if self._count > _MAX_RECORDS:
            raise self._broken(f"it has {self._count} records, more than any checkpoint")
        directory = self._read(self._start, self._size)
        entries, at = [], 0
        for _ in range(self._count):
            if at + _CENTRAL.size > len(directory):
                raise self._broken("its directory is cut short")
            fields = _CENTRAL.unpack_from(directory, at)
            name_end = at + _CENTRAL.size + fields[10]
            extra_end = name_end + fields[11]
            if fields[0] != b"PK\x01\x02" or extra_end + fields[12] > len(directory):
                raise self._broken("its directory is damaged")
            name = directory[at + _CENTRAL.size : name_end].decode("utf-8", "surrogateescape")
            entries.append(self._entry(name, fields, directory[name_end:extra_end]))
            at = extra_end + fields[12]
        if at != len(directory):
            raise self._broken("its directory has more than its entries")
        return entries

    def _entry(self, name: str, fields: tuple[int, ...], extra: bytes) -> _Entry:
        self._check_name(name)
        flags, method, packed, nbytes, disk, attributes, header = (fields[at] for at in (3, 4, 8, 9, 13, 15, 16))
        if flags & _ENCRYPTED:
            raise ArchiveError(f"{self._file.path}: {quoted(name)} is encrypted; save the checkpoint without")
        if method:
            raise ArchiveError(
                f"{self._file.path}: {quoted(name)} is compressed, and cannot be read in parts; "
                "unpack the archive, or load it with torch.load and save it again"
            )
        wide = _zip64_field(extra)
        sizes = []
        for value in (nbytes, packed, header):
            if value == 0xFFFFFFFF:
                if len(wide) < 8:
                    raise self._broken(f"the size of {quoted(name)} is missing")
                value, wide = int.from_bytes(wide[:8], "little"), wide[8:]
            sizes.append(value)
        nbytes, packed, header = sizes
        if packed != nbytes or disk not in (0, 0xFFFF):
            raise self._broken(f"{quoted(name)} is stored, but in another number of bytes than it has")
        if nbytes and (name.endswith("/") or attributes & _IS_DIRECTORY):
            # Torch reads nothing from such a record: the tensor has arbitrary contents.
            raise self._broken(f"the directory {quoted(name)} has contents")
        return _Entry(name, header, nbytes, fields[7])

    def _check_name(self, name: str) -> None:
        parts = name.removesuffix("/").split("/")
        if "\\" in name or "\0" in name or not all(part and part not in (".", "..") for part in parts):
            raise ArchiveError(f"{self._file.path} has a record with the invalid name {quoted(name)}")

    def _header_range(self, entry: _Entry) -> tuple[int, int]:
        """Return offset and length of a record's header, with the name in it."""
        length = _LOCAL.size + len(entry.name.encode("utf-8", "surrogateescape"))
        if entry.header + length > self._start:
            raise self._broken(f"{quoted(entry.name)} is outside the archive")
        return entry.header, length

    def _data_offset(self, entry: _Entry, header: bytes) -> int:
        """Return the offset of the record's data, after its header: only the header has the length of its padding."""
        name = entry.name.encode("utf-8", "surrogateescape")
        magic, _, flags, method, *_, name_length, extra_length = _LOCAL.unpack_from(header)
        if magic != MAGIC or flags & _ENCRYPTED or method:
            raise self._broken(f"the header of {quoted(entry.name)} does not match the directory")
        if name_length != len(name) or header[_LOCAL.size :] != name:
            raise ArchiveError(
                f"{self._file.path}: {quoted(entry.name)} has another name in its header; do not use this file"
            )
        return int(entry.header + _LOCAL.size + name_length + extra_length)

    def _check_overlaps(self, entries: list[_Entry], records: dict[str, ZipRecord]) -> None:
        end = 0
        for entry in sorted(entries, key=lambda entry: entry.header):
            if entry.header < end:
                raise ArchiveError(
                    f"{self._file.path}: {quoted(entry.name)} shares bytes with the record before it; "
                    "do not use this file"
                )
            end = records[entry.name].offset + entry.nbytes
        if end > self._start:
            raise ArchiveError(f"{self._file.path}: its last record runs into its directory; it is damaged")

    def _read(self, offset: int, count: int) -> bytes:
        if offset + count > self._file.size:
            raise self._broken("it ends too early")
        data = bytearray(count)
        self._file.read_into(memoryview(data), offset)
        return bytes(data)

    def _broken(self, what: str) -> ArchiveError:
        return ArchiveError(f"{self._file.path} starts like a zip archive, but {what}; get it again")


def _zip64_field(extra: bytes) -> bytes:
    """Return the 64-bit sizes among the extra fields of an entry, if there are any."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == _ZIP64_FIELD:
            return extra[at + 4 : at + 4 + length]
        at += 4 + length
    return b""
