# SPDX-License-Identifier: Apache-2.0
"""`LegacyMultiStorageSource`: the storages of a checkpoint of PyTorch 0.1.10 to 1.5.

Five pickles (magic number, version, machine, contents, keys of the storages), and then the storages in the order of the
keys. Each storage is a count of elements and their bytes.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import PyTorchCheckpointError
from nvflare_lazy.formats.pytorch._pickle import StorageRef, storage_ref, unpickle
from nvflare_lazy.formats.pytorch._stream import PickleStream
from nvflare_lazy.formats.pytorch.data_source import LazyDataSource

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from nvflare_lazy.tensors.byte_source import ByteSource
    from nvflare_lazy.tensors.tensor_file import OpenFile

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
# The first bytes of the file hold it in one of these forms, by the protocol of the pickle.
MAGIC_FORMS = (b"\x8a\x0a" + MAGIC_NUMBER.to_bytes(10, "little"), f"L{MAGIC_NUMBER}L\n".encode())
_VERSION = 1001
_COUNT_BYTES = 8


class LegacyMultiStorageSource(LazyDataSource):
    """A legacy checkpoint.

    The boundaries of the storages are in the file: each count of elements, times the width that the storage's class
    has, leads to the next one. So none of them needs to be read to find another.

    Args:
        path: The file.
        file: The same file if it is open already.
    """

    def __init__(self, path: str | os.PathLike[str], file: OpenFile | None = None) -> None:
        super().__init__(path, file)
        self._announced: dict[str, StorageRef] = {}
        stream = PickleStream(self.file, 0, self.file.size)
        if self._unpickle(stream) != MAGIC_NUMBER or self._unpickle(stream) != _VERSION:
            raise PyTorchCheckpointError(f"{self.path} does not start like a PyTorch checkpoint")
        # Says, among others, whether the machine was big-endian. The storages never are: those machines turned the
        # bytes around on writing.
        self._unpickle(stream)
        self.swapped = sys.byteorder != "little"
        self.content = self._unpickle(stream)
        keys = self._unpickle(stream)
        self.spend = stream.spend
        self._storages = self._walk(keys, stream.position)

    def keys(self) -> list[str]:
        return list(self._storages)

    def _storage(self, key: str) -> ByteSource | None:
        return self._storages.get(key.rpartition("/")[2])

    def set_storage_keys(self, keys: Sequence[str]) -> None:
        """Check the order of the storages, which the file itself states.

        Raises:
            PyTorchCheckpointError: The file has other keys, or another order.
        """
        found = self.keys()
        if list(keys) != found:
            raise PyTorchCheckpointError(f"{self.path} has the storages {quoted(found)}, not {quoted(list(keys))}")

    def track_storage_usage(self, storage_key: str, offset: int, size: int) -> None:
        """Check that a tensor's bytes are within its storage, whose boundaries the file itself states.

        Raises:
            ValueError: They are not.
        """
        self.storage(storage_key).slice(offset, size)

    def _unpickle(self, stream: PickleStream) -> object:
        return unpickle(stream, self._load_id)

    def _load_id(self, persistent_id: object) -> object:
        if type(persistent_id) is not tuple or len(persistent_id) != 6 or persistent_id[0] != "storage":
            raise ValueError("the id of a storage is not a tuple of six")
        _, storage_type, key, _, numel, view = persistent_id
        ref = storage_ref(storage_type, key, numel, view)
        # The class that mentions a storage first is the one that its elements are counted by.
        first = self._announced.setdefault(ref.key, ref)
        if ref.total > first.total:
            raise ValueError(f"storage {quoted(ref.key)} has {first.total} bytes, and {ref.total} elsewhere")
        return ref

    def _walk(self, keys: object, at: int) -> dict[str, ByteSource]:
        if type(keys) is not list:
            raise PyTorchCheckpointError(f"{self.path} has no list of storages after its contents; it is damaged")
        storages: dict[str, ByteSource] = {}
        for key in keys:
            announced = self._announced.get(key) if type(key) is str else None
            if announced is None or key in storages:
                raise PyTorchCheckpointError(
                    f"{self.path} lists a storage that no tensor is in, or one twice; it is damaged"
                )
            nbytes = self._count(announced, at) * announced.dtype.itemsize
            at += _COUNT_BYTES
            if nbytes != announced.total or at + nbytes > self.file.size:
                raise PyTorchCheckpointError(
                    f"{self.path}: storage {quoted(key)} should have {announced.total} bytes, but says {nbytes} and "
                    f"{max(self.file.size - at, 0)} are left: the file is damaged or cut short; get it again"
                )
            storages[key] = self.file.source(at, nbytes)
            at += nbytes
        for key in self._announced.keys() - storages.keys():
            raise self._missing(key)
        return storages

    def _count(self, announced: StorageRef, at: int) -> int:
        if at + _COUNT_BYTES > self.file.size:
            raise PyTorchCheckpointError(
                f"{self.path} ends before storage {quoted(announced.key)}: it was cut short; get it again"
            )
        count = self.file.source(at, _COUNT_BYTES).read()
        return int.from_bytes(count, "little", signed=True)
