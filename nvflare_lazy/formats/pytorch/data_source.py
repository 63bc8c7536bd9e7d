# SPDX-License-Identifier: Apache-2.0
"""`LazyDataSource`: the storages of a PyTorch checkpoint by key, read on demand and in part.

The interface that the three kinds of checkpoint share, independent of their containers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import PyTorchCheckpointError
from nvflare_lazy.remote import open_file
from nvflare_lazy.tensors.tensor_file import OpenFile

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from nvflare_lazy.tensors.byte_source import ByteSource


class LazyDataSource(ABC):
    """The storages of a checkpoint on one shared descriptor.

    A storage is found by its key ("0") or by its name in the archive ("model/data/0", "data/0").

    Example:
        >>> data = LazyDataSource.from_zip("model.pt")
        >>> data.keys()
        ['0', '1']
        >>> data.read_range("0", 0, 16)  # these bytes are read, and no others

    Attributes:
        file: The open file.
        path: Its path.
        content: What the pickle describes: records of tensors, and plain data.
        spend: Counts the memory that the contents take, up to a limit.
        swapped: Whether numbers in the storages have the other byte order than this machine's.
    """

    spend: Callable[[int], None]

    def __init__(self, path: str | os.PathLike[str], file: OpenFile | None = None) -> None:
        self.file = open_file(path) if file is None else file
        self.path = self.file.path
        self.content: object = None
        self.swapped = False

    @staticmethod
    def from_zip(path: str | os.PathLike[str]) -> LazyDataSource:
        """Open a checkpoint of `torch.save` since PyTorch 1.6."""
        from nvflare_lazy.formats.pytorch._zip import ZipSource

        return ZipSource(path)

    @staticmethod
    def from_legacy_multi_storage(path: str | os.PathLike[str]) -> LazyDataSource:
        """Open a checkpoint of PyTorch 0.1.10 to 1.5, or of `_use_new_zipfile_serialization=False`."""
        from nvflare_lazy.formats.pytorch._legacy import LegacyMultiStorageSource

        return LegacyMultiStorageSource(path)

    @abstractmethod
    def keys(self) -> list[str]:
        """Return the keys of all storages, in the order of the file."""

    @abstractmethod
    def _storage(self, key: str) -> ByteSource | None:
        """Return the bytes of a storage, or None if there is no such key."""

    def storage(self, key: str) -> ByteSource:
        """Return the bytes of a storage as a source, without reading them."""
        found = self._storage(key)
        if found is None:
            raise self._missing(key)
        return found

    def _missing(self, key: str) -> PyTorchCheckpointError:
        return PyTorchCheckpointError(
            f"{self.path} has no storage {quoted(key)}: the file is damaged or incomplete; get it again"
        )

    def contains(self, key: str) -> bool:
        """Whether there is a storage of this key."""
        return self._storage(key) is not None

    def read(self, key: str) -> bytearray:
        """Return all bytes of a storage, as they are in the file."""
        return self.storage(key).read()

    def read_range(self, key: str, offset: int, length: int) -> bytearray:
        """Return `length` bytes of a storage, starting at `offset`, as they are in the file."""
        return self.storage(key).read(offset, length)
