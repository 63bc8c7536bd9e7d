# SPDX-License-Identifier: Apache-2.0
"""A safetensors file as lazy tensors: the header is read and checked, the data is left where it is.

What a received result, a checkpoint and a shard of one are opened with. One descriptor a file, read with `pread`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from nvflare_lazy.errors import UnsupportedDtypeError
from nvflare_lazy.formats.safetensors_header import SafetensorsHeader, read_header
from nvflare_lazy.tensors.byte_source import ByteSource
from nvflare_lazy.tensors.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.tensors.tensor_entry import TensorEntry
from nvflare_lazy.tensors.tensor_file import FileSource, TensorFile

if TYPE_CHECKING:
    import os

    from nvflare_lazy.tensors.dtypes import ElementType
    from nvflare_lazy.tensors.lazy_array import LazyArray
    from nvflare_lazy.tensors.lazy_tensor import LazyTensor
    from nvflare_lazy.tensors.tensor_file import StoredTensor


def open_safetensors(path: str | os.PathLike[str], *, keep_alive: object = None) -> LazyTensorDict:
    """Open a safetensors file.

    Args:
        path: The file.
        keep_alive: Anything that must live as long as a tensor of the file, such as the lease of its directory.

    Example:
        >>> tensors = open_safetensors("model.safetensors")
        >>> tensors.metadata
    """
    file = TensorFile(path)
    if keep_alive is not None:
        file.own(keep_alive)
    header = read_header(file)
    return LazyTensorDict.from_entries(entries_of(file, header), metadata=header.metadata)


def entries_of(file: TensorFile, header: SafetensorsHeader) -> dict[str, TensorEntry]:
    """Return the recipes of a file's tensors, in the order in which they lie in the file."""
    return {
        name: entry_of(FileSource(file, stored.offset, stored.nbytes), stored)
        for name, stored in header.tensors.items()
    }


def entry_of(source: ByteSource, stored: StoredTensor) -> TensorEntry:
    """Return the recipe of one tensor of a header.

    Args:
        source: The tensor's bytes.
        stored: What the header says of it.
    """
    row, shape = stored.element_type, stored.shape
    if row.packed != 1 and shape:
        # The header counts elements, torch counts the bytes that several of them share.
        shape = (*shape[:-1], shape[-1] // row.packed)
    whole = row.packed == 1 or (bool(stored.shape) and stored.shape[-1] % row.packed == 0)
    if row.torch is None or not whole:
        return UntypedEntry(source, row, stored.shape)
    return TensorEntry(source, row.torch, shape)


class UntypedEntry(TensorEntry):
    """A tensor of a type or packing that torch cannot hold: it can be listed, copied and saved, but not be used.

    Args:
        source: Its bytes.
        element_type: Its type, by the format's name.
        shape: Its shape as the format counts.
    """

    __slots__ = ("element_type",)

    def __init__(self, source: ByteSource, element_type: ElementType, shape: tuple[int, ...]) -> None:
        self.source = source
        self.element_type = element_type
        self.shape = shape
        self.strides = None
        self.storage_offset = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.source.nbytes

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # there is nothing to set
        """Raise: there is none."""
        self._refuse()

    def over(self, source: ByteSource) -> UntypedEntry:
        """Return the same recipe for another storage."""
        return UntypedEntry(source, self.element_type, self.shape)

    def lazy(self) -> LazyTensor:
        """Raise: torch has no such tensor."""
        self._refuse()

    def array(self) -> LazyArray:
        """Raise: NumPy has no such array."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedDtypeError(
            f"torch {torch.__version__} cannot hold a tensor of shape {list(self.shape)} and type "
            f"{self.element_type.name} (in {self.source.describe()}): it can be listed, copied and saved, not used"
        )
