# SPDX-License-Identifier: Apache-2.0
"""The array backends, torch and NumPy: everything that differs between payloads of tensors and of arrays.

Senders ask a backend for the bytes of a value, receivers for a value over bytes; how the bytes travel, and what may go
wrong with them, is the same for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nvflare_lazy.errors import UnsupportedDtypeError
from nvflare_lazy.tensors import dtypes
from nvflare_lazy.tensors.entry import array_rows, entry_of
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.tensors.tensor_memory import array_bytes, storage_bytes
from nvflare_lazy.transport.nvflare_items.format import pack_array, pack_tensor, unpack_arrays, unpack_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvflare_lazy.tensors.byte_source import ByteSource


class ArrayBackend(ABC):
    """Properties of a kind of value that transport uses."""

    name: str

    @abstractmethod
    def describe(self, value: Any) -> tuple[Any, tuple[int, ...]]:
        """Return dtype and shape of a value, without any I/O."""

    @abstractmethod
    def source(self, value: Any) -> ByteSource:
        """Return the row-major bytes of a value, without copying memory or loading a lazy value."""

    @abstractmethod
    def identity(self, value: Any) -> object:
        """Return a key that two values share only if they have the same bytes; None if that is not known."""

    @abstractmethod
    def encode_dtype(self, dtype: Any) -> Any:
        """Return a dtype as text, or whatever else can travel."""

    @abstractmethod
    def decode_dtype(self, encoded: Any) -> Any:
        """Return the dtype, or None if there is no such type."""

    @abstractmethod
    def format_name(self, dtype: Any) -> str | None:
        """Return what a safetensors file calls the dtype, or None if it has no name for it."""

    @abstractmethod
    def new(self, dtype: Any, shape: tuple[int, ...]) -> tuple[Any, memoryview]:
        """Return an ordinary value without contents, and its memory."""

    @abstractmethod
    def lazy(self, source: ByteSource, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Return the lazy value that consists of these bytes."""

    @abstractmethod
    def unknown(self) -> tuple[Any, tuple[int, ...]]:
        """Return the dtype and shape of a failed value whose description was not received."""

    @abstractmethod
    def pack_item(self, name: str, value: Any, source: ByteSource) -> bytearray | memoryview:
        """Write a value, whose row-major bytes are `source`, in NVFlare's item format."""

    @abstractmethod
    def unpack_item(self, item: Any, sender: str) -> Iterator[tuple[str, Any, tuple[int, ...], memoryview]]:
        """Read name, dtype, shape and bytes of each value in an item in NVFlare's format.

        Raises:
            ProtocolError: If the item contradicts its header.
        """

    def nbytes(self, dtype: Any, shape: tuple[int, ...]) -> int:
        """Return the bytes of a value."""
        return prod(shape) * int(dtype.itemsize)


class TorchBackend(ArrayBackend):
    """`torch.Tensor` and `LazyTensor`."""

    name = "torch"

    def describe(self, value: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
        return value.dtype, tuple(value.shape)

    def source(self, value: torch.Tensor) -> ByteSource:
        return entry_of(value).rows()

    def identity(self, value: torch.Tensor) -> object:
        if isinstance(value, LazyTensor):
            return _file_identity(value.source, value.dtype, value.shape)
        if value.device.type != "cpu" or value.layout is not torch.strided:
            return None
        return value.data_ptr(), value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()

    def encode_dtype(self, dtype: torch.dtype) -> str:
        return str(dtype).removeprefix("torch.")

    def decode_dtype(self, encoded: Any) -> torch.dtype | None:
        return _TORCH_TYPES.get(encoded) if isinstance(encoded, str) else None

    def format_name(self, dtype: torch.dtype) -> str | None:
        row = dtypes.by_torch(dtype)
        return row.name if row.packed == 1 else None

    def new(self, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.Tensor, memoryview]:
        tensor = torch.empty(shape, dtype=dtype)
        return tensor, storage_bytes(tensor)

    def lazy(self, source: ByteSource, dtype: torch.dtype, shape: tuple[int, ...]) -> LazyTensor:
        return LazyTensor.of_whole(source, dtype, shape)

    def unknown(self) -> tuple[torch.dtype, tuple[int, ...]]:
        return torch.float32, (1,)

    def pack_item(self, name: str, value: torch.Tensor, source: ByteSource) -> bytearray:
        return pack_tensor(name, value, source)

    def unpack_item(self, item: Any, sender: str) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], memoryview]]:
        return unpack_tensors(item, sender)


class NumpyBackend(ArrayBackend):
    """`np.ndarray` and `LazyArray`."""

    name = "numpy"

    def describe(self, value: np.ndarray[Any, Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
        if value.dtype.hasobject:
            raise UnsupportedDtypeError("cannot send an array of Python objects; send its values in a list")
        return value.dtype, tuple(value.shape)

    def source(self, value: np.ndarray[Any, Any]) -> ByteSource:
        return array_rows(value)

    def identity(self, value: np.ndarray[Any, Any]) -> object:
        if isinstance(value, LazyArray):
            return _file_identity(value.source, value.dtype.str, value.shape)
        return value.__array_interface__["data"][0], str(value.dtype), value.shape, value.strides

    def encode_dtype(self, dtype: np.dtype[Any]) -> Any:
        return np.lib.format.dtype_to_descr(dtype)

    def decode_dtype(self, encoded: Any) -> np.dtype[Any] | None:
        try:
            dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(_as_descr(encoded))
        except (TypeError, ValueError, IndexError, SyntaxError, RecursionError):
            return None
        return None if dtype.hasobject else dtype

    def format_name(self, dtype: np.dtype[Any]) -> str | None:
        # The format is little-endian.
        if not dtype.isnative:
            return None
        try:
            return dtypes.by_numpy(dtype).name
        except UnsupportedDtypeError:
            return None

    def new(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], memoryview]:
        array: np.ndarray[Any, Any] = np.empty(shape, dtype)
        return array, array_bytes(array)

    def lazy(self, source: ByteSource, dtype: np.dtype[Any], shape: tuple[int, ...]) -> LazyArray:
        return LazyArray(source, dtype, shape)

    def unknown(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        return np.dtype(np.float32), (1,)

    def pack_item(self, name: str, value: np.ndarray[Any, Any], source: ByteSource) -> memoryview:
        return pack_array(name, value)

    def unpack_item(self, item: Any, sender: str) -> Iterator[tuple[str, np.dtype[Any], tuple[int, ...], memoryview]]:
        return unpack_arrays(item, sender)


_TORCH_TYPES: dict[str, torch.dtype] = {
    str(row.torch).removeprefix("torch."): row.torch for row in dtypes.ELEMENT_TYPES if row.torch is not None
}

TORCH = TorchBackend()
NUMPY = NumpyBackend()
BACKENDS: dict[str, ArrayBackend] = {backend.name: backend for backend in (TORCH, NUMPY)}


def _file_identity(source: ByteSource, *rest: object) -> object:
    found = source.file_range()
    return None if found is None else (id(found[0]), found[1], *rest)


def _as_descr(encoded: Any) -> Any:
    """Undo what msgpack does to the description of a structured type: its tuples become lists of tuples again."""
    if isinstance(encoded, tuple) and encoded and all(isinstance(field, tuple) for field in encoded):
        return [(field[0], _as_descr(field[1]), *field[2:]) for field in encoded]
    if isinstance(encoded, str):
        return encoded
    raise ValueError("invalid description of an array's type")
