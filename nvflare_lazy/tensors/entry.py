# SPDX-License-Identifier: Apache-2.0
"""`TensorEntry`: dtype, shape, strides and byte source of a tensor; `entry_of()` creates one from any value.

Readers, receivers, aggregation and saving describe tensors with entries, ten thousands of them at almost no cost.
`LazyTensorDict` makes lazy tensors of the entries that are used.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nvflare_lazy.errors import UnsupportedDtypeError, UnsupportedTensorError
from nvflare_lazy.tensors import dtypes
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.converted_sources import ByteSwappedSource
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.tensors.strided_source import StridedSource
from nvflare_lazy.tensors.tensor_memory import array_bytes, extent, storage_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvflare_lazy.tensors.byte_source import ByteSource
    from nvflare_lazy.tensors.dtypes import ElementType
    from nvflare_lazy.tensors.tensor_file import OpenFile, StoredTensor, TensorFile


# Two threads that ask for the same entry get the same tensor. Reentrant, because the garbage collector may run here.
_publishing = threading.RLock()
os.register_at_fork(after_in_child=_publishing._at_fork_reinit)  # type: ignore[attr-defined]


class TensorSpec(NamedTuple):
    """Dtype and shape: what several versions of one tensor have in common."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorEntry:
    """Description of one readable tensor.

    Args:
        source: The storage that the geometry refers to, in native byte order.
        element_type: The type of the elements.
        shape: The shape, counted in torch's elements. If torch does not have the type, in elements of the format.
        strides: Strides in elements, or None for a row-major tensor.
        storage_offset: First element in the storage.
    """

    __slots__ = ("_made", "element_type", "shape", "source", "storage_offset", "strides")

    def __init__(
        self,
        source: ByteSource,
        element_type: ElementType,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        storage_offset: int = 0,
    ) -> None:
        self.source = source
        self.element_type = element_type
        self.shape = shape
        self.strides = strides
        self.storage_offset = storage_offset
        self._made: weakref.ref[LazyTensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype.

        Raises:
            UnsupportedDtypeError: torch does not have the type. The entry can be listed, copied and saved, but not
                used as a tensor.
        """
        dtype = self.element_type.torch
        if dtype is None:
            raise UnsupportedDtypeError(
                f"torch {torch.__version__} cannot hold a tensor of shape {list(self.shape)} and type "
                f"{self.element_type.name} (in {self.source.describe()}): it can be listed, copied and saved, not used"
            )
        return dtype

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape."""
        return TensorSpec(self.dtype, self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements in row-major order."""
        return prod(self.shape) * self.element_type.bits * self.element_type.packed // 8

    def over(self, source: ByteSource) -> TensorEntry:
        """Return the same description for another storage."""
        return TensorEntry(source, self.element_type, self.shape, self.strides, self.storage_offset)

    def rows(self) -> ByteSource:
        """Return the elements as bytes, in row-major order and native byte order."""
        made = self._made() if self._made is not None else None
        if made is not None:
            # The lazy tensor reads from memory once a pointer to its elements was taken.
            return made.source
        nbytes = self.nbytes
        if self.strides is None:
            if nbytes == self.source.nbytes:
                return self.source
            return self.source.slice(self.storage_offset * self.dtype.itemsize if nbytes else 0, nbytes)
        return StridedSource(self.source, self.dtype.itemsize, self.shape, self.strides, self.storage_offset)

    def lazy(self) -> LazyTensor:
        """Return the lazy tensor; the same object for as long as it is referenced, so that tied tensors stay tied."""
        made = self._made() if self._made is not None else None
        if made is None:
            if self.strides is None and not self.storage_offset and self.nbytes == self.source.nbytes:
                made = LazyTensor.of_whole(self.source, self.dtype, self.shape)
            else:
                made = LazyTensor(
                    self.source, self.dtype, self.shape, strides=self.strides, storage_offset=self.storage_offset
                )
            with _publishing:
                other = self._made() if self._made is not None else None
                if other is not None:
                    return other
                self._made = weakref.ref(made)
        return made

    def array(self) -> LazyArray:
        """Return the same elements as a lazy NumPy array."""
        return LazyArray.from_lazy_tensor(self.lazy())


def entry_of(value: object) -> TensorEntry:
    """Return the entry of a tensor or an array, without reading or copying it where that is possible.

    Args:
        value: A tensor or an array, lazy or not, a NumPy scalar, or an entry, which is returned as it is.

    Raises:
        UnsupportedTensorError: The value is not a tensor, or has no dense elements.
        UnsupportedDtypeError: The element type is not in the table of types.
    """
    # Aggregation calls this for each tensor of each client: entries, which are the most, come first.
    if type(value) is TensorEntry:
        return value
    element_type, shape = geometry_of(value)
    if isinstance(value, LazyTensor):
        return TensorEntry(value.source, element_type, shape)
    if isinstance(value, torch.Tensor):
        return TensorEntry(_tensor_rows(value), element_type, shape)
    assert isinstance(value, (LazyArray, np.ndarray, np.generic))
    source = array_rows(value)
    if not value.dtype.isnative:
        width = value.dtype.itemsize // 2 if value.dtype.kind == "c" else value.dtype.itemsize
        source = ByteSwappedSource(source, width)
    return TensorEntry(source, element_type, shape)


def geometry_of(value: object) -> tuple[ElementType, tuple[int, ...]]:
    """Return element type and shape of whatever `entry_of` accepts, without its bytes."""
    if isinstance(value, LazyTensor):
        # Not through torch, which takes eight times as long to answer.
        geometry = value._geometry_
        return dtypes.by_torch(geometry.dtype), geometry.shape
    if isinstance(value, TensorEntry):
        return value.element_type, value.shape
    if isinstance(value, torch.Tensor):
        return dtypes.by_torch(value.dtype), tuple(value.shape)
    if isinstance(value, (np.ndarray, np.generic)):
        return dtypes.by_numpy(value.dtype), tuple(value.shape)
    raise UnsupportedTensorError(f"a {type(value).__name__} is neither a tensor nor an array")


def array_rows(array: LazyArray | np.ndarray[Any, Any] | np.generic) -> ByteSource:
    """Return the elements of an array as bytes, in row-major order and in the array's own byte order.

    Nothing is copied, unless elements are in descending order or between bytes of others.
    """
    if isinstance(array, LazyArray):
        return array.source
    array = np.asarray(array)
    if array.flags.c_contiguous or not array.nbytes:
        return MemorySource(array_bytes(array))
    if min(array.strides) >= 0 and all(step % array.itemsize == 0 for step in array.strides):
        strides = tuple(step // array.itemsize for step in array.strides)
        flat = np.lib.stride_tricks.as_strided(
            array, (extent(array.shape, strides),), (array.itemsize,), writeable=False
        )
        return StridedSource(MemorySource(array_bytes(flat)), array.itemsize, array.shape, strides, 0)
    return MemorySource(array_bytes(np.ascontiguousarray(array)))


def _tensor_rows(tensor: torch.Tensor) -> ByteSource:
    try:
        if (
            tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
        ):
            return MemorySource(storage_bytes(tensor.detach()))
        return LazyTensor.from_tensor(tensor).source
    except (RuntimeError, ValueError) as error:
        raise UnsupportedTensorError(f"a {type(tensor).__name__} cannot be read: {error}") from None


def entries_of(file: OpenFile) -> dict[str, TensorEntry]:
    """Return the entries of all tensors of a file with known contents, in the order of their bytes.

    They are made on demand and never kept by the file, which they refer to.
    """
    return {
        name: TensorEntry(file.source(stored.offset, stored.nbytes), *_geometry(stored))
        for name, stored in (file.contents or {}).items()
    }


def files_holding(values: Mapping[str, object]) -> list[TensorFile]:
    """Return the files whose contents are these lazy tensors or arrays and no others, without any I/O.

    The list is empty if there are no such files.
    """
    entries = {}
    for name, value in values.items():
        if not isinstance(value, (LazyTensor, LazyArray)):
            return []
        entries[name] = entry_of(value)
    files = {found[0] for entry in entries.values() if (found := entry.source.file_range()) is not None}
    stored = {name: (file, tensor) for file in files for name, tensor in (file.contents or {}).items()}
    if stored.keys() != entries.keys() or sum(len(file.contents or ()) for file in files) != len(entries):
        return []
    for name, entry in entries.items():
        file, tensor = stored[name]
        if (entry.element_type, entry.shape) != _geometry(tensor):
            return []
        if tensor.nbytes and entry.source.file_range() != (file, tensor.offset):
            return []
    return sorted(files, key=lambda file: file.path)


def _geometry(stored: StoredTensor) -> tuple[ElementType, tuple[int, ...]]:
    """Return element type and shape as torch counts them; the type without its dtype if torch cannot hold it."""
    element_type, shape, _, _ = stored
    if element_type.torch is None or element_type.packed != 1:
        # The header counts elements, torch counts the bytes that several of them share.
        if element_type.torch is not None and shape and shape[-1] % element_type.packed == 0:
            shape = (*shape[:-1], shape[-1] // element_type.packed)
        else:
            element_type = replace(element_type, torch=None, packed=1)
    return element_type, shape
