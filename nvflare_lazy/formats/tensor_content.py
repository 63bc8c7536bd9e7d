# SPDX-License-Identifier: Apache-2.0
"""What a file will hold of a tensor: its type, its shape as the format counts, and where its bytes come from.

Lazy and ordinary tensors, torch's and NumPy's, strided, byte-swapped or cast: saving knows only this one form of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import UnserializableTensorError, UnsupportedDtypeError
from nvflare_lazy.formats.converted_sources import CastSource, check_cast
from nvflare_lazy.formats.safetensors_layout import TensorMeta
from nvflare_lazy.formats.safetensors_reader import UntypedEntry
from nvflare_lazy.tensors import dtypes
from nvflare_lazy.tensors.byte_source import ByteSource, MemorySource
from nvflare_lazy.tensors.dtypes import ElementType
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.tensors.tensor_entry import TensorEntry
from nvflare_lazy.tensors.tensor_memory import storage_bytes


def meta_of(name: str, value: object, *, dtype: torch.dtype | None = None) -> TensorMeta:
    """Return what a header will say of a tensor.

    Args:
        name: Its name.
        value: A `torch.Tensor` or `np.ndarray`, lazy or ordinary, or the recipe of a lazy tensor.
        dtype: What floating-point tensors are to be cast to.
    """
    if isinstance(value, UntypedEntry):
        if dtype is not None:
            raise UnsupportedDtypeError(
                f"tensor {quoted(name)}: torch cannot cast {value.element_type.name} to {dtype}"
            )
        return TensorMeta(name, _name_of(value.element_type, name), value.shape)
    row = _row_of(name, value)
    if _is_cast(row, dtype):
        assert row.torch is not None
        assert dtype is not None
        try:
            check_cast(row.torch, dtype)
        except UnsupportedDtypeError as error:
            raise UnsupportedDtypeError(f"tensor {quoted(name)}: {error}") from None
        row = dtypes.by_torch(dtype)
    shape: tuple[int, ...] = tuple(value.shape)  # type: ignore[attr-defined]
    return TensorMeta(name, _name_of(row, name), _format_shape(row, shape, name))


def bytes_of(name: str, value: object, *, dtype: torch.dtype | None = None) -> ByteSource | memoryview:
    """Return where the bytes that a file will hold of a tensor come from; those of a lazy one are not touched."""
    if isinstance(value, UntypedEntry):
        return value.source
    if isinstance(value, TensorEntry):
        value = value.lazy()
    if isinstance(value, LazyArray) and not value.dtype.isnative:
        value = value.materialize()
    source: ByteSource | memoryview
    if isinstance(value, (LazyTensor, LazyArray)):
        source = value.source
    elif isinstance(value, torch.Tensor):
        source = _tensor_bytes(name, value)
    else:
        # NumPy turns arrays without dimensions into scalars at every opportunity.
        source = _array_bytes(np.asarray(value))
    row = _row_of(name, value)
    if _is_cast(row, dtype):
        assert row.torch is not None
        assert dtype is not None
        source = CastSource(source if isinstance(source, ByteSource) else MemorySource(source), row.torch, dtype)
    return source


def _row_of(name: str, value: object) -> ElementType:
    try:
        if isinstance(value, (torch.Tensor, TensorEntry)):
            return dtypes.by_torch(value.dtype)
        if isinstance(value, (np.ndarray, np.generic)):
            return dtypes.by_numpy(value.dtype)
    except UnsupportedDtypeError as error:
        raise UnsupportedDtypeError(f"{quoted(name)}: {error}") from None
    raise UnserializableTensorError(f"{quoted(name)} is a {type(value).__name__}: only tensors and arrays can be saved")


def _is_cast(row: ElementType, dtype: torch.dtype | None) -> bool:
    return dtype is not None and row.torch is not None and row.torch.is_floating_point and row.torch != dtype


def _name_of(row: ElementType, name: str) -> str:
    if row.name is None:
        raise UnsupportedDtypeError(
            f"tensor {quoted(name)} is {row.torch}, which safetensors files cannot hold: convert it first, "
            "for example with .to(torch.complex64)"
        )
    return row.name


def _format_shape(row: ElementType, shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    if row.packed == 1:
        return shape
    if not shape:
        raise UnserializableTensorError(
            f"tensor {quoted(name)} is a single {row.torch}: it holds {row.packed} elements"
        )
    return (*shape[:-1], shape[-1] * row.packed)


def _tensor_bytes(name: str, tensor: torch.Tensor) -> ByteSource | memoryview:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnserializableTensorError(
            f"tensor {quoted(name)} is sparse or quantized: convert it with to_dense() first"
        )
    if tensor.device.type == "meta":
        raise UnserializableTensorError(f"tensor {quoted(name)} is on the meta device: it has no elements")
    tensor = tensor.detach().cpu()
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return LazyTensor.from_tensor(tensor).source
    try:
        has_memory = tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:
        has_memory = False
    if not has_memory:
        raise UnserializableTensorError(f"tensor {quoted(name)} is a {type(tensor).__name__} without memory of its own")
    return storage_bytes(tensor)


def _array_bytes(array: np.ndarray[Any, Any]) -> ByteSource | memoryview:
    if array.flags.c_contiguous and array.dtype.isnative:
        return array.reshape(-1).view(np.uint8).data
    return _GatheredArray(array)


class _GatheredArray(ByteSource):
    """The little-endian, row-major bytes of an array of any strides and byte order, gathered as they are read."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self.nbytes = array.nbytes

    def describe(self) -> str:
        return "memory"

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        first, skipped = divmod(offset, self._array.itemsize)
        stop = -(-(offset + len(buffer)) // self._array.itemsize)
        part = self._array.flat[first:stop].astype(self._array.dtype.newbyteorder("="))
        buffer[:] = part.view(np.uint8).data[skipped : skipped + len(buffer)]
