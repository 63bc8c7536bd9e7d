# SPDX-License-Identifier: Apache-2.0
"""From the records of a checkpoint's tensors to entries of a `LazyTensorDict`, each checked against its storage.

The last step of opening a checkpoint. What shares a storage in the file shares its source here, and tensors that are
tied (same storage, same geometry) become one entry.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import PyTorchCheckpointError, UnsupportedDtypeError, UnsupportedTensorError
from nvflare_lazy.formats.unpickler import StorageRef, UnsupportedTensor
from nvflare_lazy.tensors import dtypes
from nvflare_lazy.tensors.byte_source import FailedSource
from nvflare_lazy.tensors.converted_sources import ByteSwappedSource, ConjugatedSource
from nvflare_lazy.tensors.entry import TensorEntry
from nvflare_lazy.tensors.strided_source import is_contiguous
from nvflare_lazy.tensors.tensor_memory import extent

if TYPE_CHECKING:
    from nvflare_lazy.formats.checkpoint_tree import TensorRecord
    from nvflare_lazy.formats.data_source import LazyDataSource
    from nvflare_lazy.tensors.byte_source import ByteSource

# What torch itself can count: dimensions, and bytes of a tensor.
_MOST_DIMENSIONS = 64
_MOST_BYTES = (1 << 63) - 1


class _View(NamedTuple):
    """A strided tensor over a storage of the file; its numbers may be nonsense."""

    storage: StorageRef
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    conjugated: bool = False
    negated: bool = False


class EntryMaker:
    """Makes the entries of one file.

    Args:
        data: The file's storages.
    """

    def __init__(self, data: LazyDataSource) -> None:
        self._data = data
        self._entries: dict[_View, TensorEntry] = {}
        self._sources: dict[tuple[StorageRef, int, tuple[bool, ...]], ByteSource] = {}

    def entry(self, name: str, record: TensorRecord) -> TensorEntry:
        """Return the entry of a tensor, the same one for the same record.

        Args:
            name: What the tensor is called, for messages.
            record: The tensor or storage as it was unpickled.
        """
        if isinstance(record, UnsupportedTensor):
            # Each of them says its own name when it is used.
            return self._failed(name, record.kind, record.dtype, record.shape)
        storage = self._data.storages.ref(record)
        if storage is None:
            kind = "a tensor of the meta device, which has no data"
            return self._failed(name, kind, record.dtype, tuple(record.size()))
        if isinstance(record, torch.Tensor):
            view = _View(
                storage,
                record.dtype,
                tuple(record.shape),
                record.stride(),
                int(record.storage_offset()),
                record.is_conj(),
                record.is_neg(),
            )
        else:
            view = _View(storage, storage.dtype, (storage.nbytes // storage.dtype.itemsize,), (1,), 0)
        made = self._entries.get(view)
        if made is None:
            made = self._entries[view] = self._make(name, view)
        return made

    def _make(self, name: str, record: _View) -> TensorEntry:
        self._check(name, record)
        try:
            element_type = dtypes.by_torch(record.dtype)
        except UnsupportedDtypeError:
            return self._failed(name, f"a tensor of {record.dtype}", record.dtype, record.shape)
        number = record.dtype.itemsize // 2 if record.dtype.is_complex else record.dtype.itemsize
        flipped = _flipped(record)
        if any(flipped) and not (record.dtype.is_complex or record.dtype.is_floating_point):
            return self._failed(name, f"a negated view of {record.dtype}", record.dtype, record.shape)
        source = self._source(record.storage, number, flipped)
        if is_contiguous(record.shape, record.strides):
            offset = record.offset if 0 not in record.shape else 0
            return TensorEntry(source, element_type, record.shape, None, offset)
        return TensorEntry(source, element_type, record.shape, record.strides, record.offset)

    def _failed(self, name: str, kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorEntry:
        self._check_shape(name, shape, dtype)
        try:
            element_type = dtypes.by_torch(dtype)
        except UnsupportedDtypeError:
            element_type = dtypes.by_torch(torch.uint8)
        error = UnsupportedTensorError(
            f"{quoted(name)} in {self._data.path} is {kind}, which cannot be read without loading it: "
            "load the checkpoint with torch.load and save it as an ordinary tensor"
        )
        return TensorEntry(
            FailedSource(prod(shape) * element_type.bits * element_type.packed // 8, error), element_type, shape
        )

    def _source(self, storage: StorageRef, width: int, flipped: tuple[bool, ...]) -> ByteSource:
        key = (storage, width if self._data.swapped else 1, flipped)
        found = self._sources.get(key)
        if found is not None:
            return found
        source = self._data.storage(storage.key).slice(storage.offset, storage.nbytes)
        if self._data.swapped and width > 1:
            source = ByteSwappedSource(source, width)
        if any(flipped):
            source = ConjugatedSource(source, width, flipped)
        self._sources[key] = source
        return source

    def _check(self, name: str, record: _View) -> None:
        self._check_shape(name, record.shape, record.dtype)
        if min((record.offset, *record.strides), default=0) < 0:
            raise self._impossible(name, "a negative stride or offset")
        end = (record.offset + extent(record.shape, record.strides)) * record.dtype.itemsize
        if 0 not in record.shape and end > record.storage.nbytes:
            raise self._impossible(name, f"elements up to byte {end} of a storage of {record.storage.nbytes} bytes")

    def _check_shape(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if len(shape) > _MOST_DIMENSIONS or min(shape, default=0) < 0:
            raise self._impossible(name, "a negative size, or too many dimensions")
        if prod(size for size in shape if size) * dtype.itemsize > _MOST_BYTES:
            raise self._impossible(name, "more bytes than can be counted")

    def _impossible(self, name: str, what: str) -> PyTorchCheckpointError:
        return PyTorchCheckpointError(f"{self._data.path}: {quoted(name)} has {what}; the file is damaged or forged")


def _flipped(record: _View) -> tuple[bool, ...]:
    """Which parts of each element have the other sign than in the storage."""
    if record.dtype.is_complex:
        return record.negated, record.negated != record.conjugated
    return (record.negated,)
