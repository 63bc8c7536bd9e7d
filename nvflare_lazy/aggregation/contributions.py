# SPDX-License-Identifier: Apache-2.0
"""What a contributor sent, reduced to what aggregation needs of it: for each tensor a type, a shape and its bytes.

The first step of aggregating a round. Lazy and ordinary tensors and arrays all become the same here, and none is read.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nvflare_lazy.errors import UnsupportedDtypeError, UnsupportedTensorError
from nvflare_lazy.tensors import dtypes
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.tensors.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.tensors.tensor_entry import TensorEntry

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping

    from nvflare_lazy.tensors.byte_source import ByteSource

#: What a contributor may send under a name.
Value = torch.Tensor | LazyTensor | LazyArray | np.ndarray[Any, Any] | np.generic


class Part(NamedTuple):
    """One tensor of a contribution.

    Attributes:
        dtype: The element type.
        shape: The shape.
        source: The elements in row-major order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    source: ByteSource

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def parts_of(tensors: Mapping[str, Any], owner: str, exclude: re.Pattern[str] | None = None) -> dict[str, Part]:
    """Return the tensors of a contribution, unread, by name.

    Args:
        tensors: Tensors or arrays by name, lazy or not.
        owner: Whose they are, for messages.
        exclude: Pass over what has such a name, whatever it is.

    Raises:
        UnsupportedTensorError: One is none, or has no dense elements.
        UnsupportedDtypeError: One is of a type that torch has not.
    """
    # Twenty thousand recipes are at hand at once; making lazy tensors of them first would take a second.
    values: Mapping[str, Any] = tensors.entries if isinstance(tensors, LazyTensorDict) else tensors
    parts = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise UnsupportedTensorError(f"a tensor of {owner} has the name {name!r}, which is no text: give it one")
        if exclude is not None and exclude.search(name):
            continue
        try:
            parts[name] = _part_of(value)
        except (UnsupportedTensorError, UnsupportedDtypeError) as error:
            raise type(error)(f"{name!r} of {owner}: {error}; exclude it, or convert it first") from error
    return parts


def _part_of(value: Any) -> Part:
    if isinstance(value, TensorEntry):
        return _of_entry(value)
    if isinstance(value, LazyTensor):
        return Part(value.dtype, tuple(value.shape), value.source)
    if isinstance(value, LazyArray):
        source = value.source if value.dtype.isnative else _native_bytes(value.materialize())
        return Part(_torch_dtype(value.dtype), value.shape, source)
    if isinstance(value, torch.Tensor):
        lazy = LazyTensor.from_tensor(value)
        return Part(lazy.dtype, tuple(lazy.shape), lazy.source)
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        return Part(_torch_dtype(array.dtype), array.shape, _native_bytes(array))
    raise UnsupportedTensorError(f"a {type(value).__name__} is neither a tensor nor an array")


def _of_entry(entry: TensorEntry) -> Part:
    dtype, nbytes = entry.dtype, entry.nbytes
    if entry.strides is not None:
        return Part(dtype, entry.shape, entry.lazy().source)
    return Part(dtype, entry.shape, entry.source.slice(entry.storage_offset * dtype.itemsize if nbytes else 0, nbytes))


def _native_bytes(array: np.ndarray[Any, Any]) -> ByteSource:
    native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return MemorySource(native.reshape(-1).view(np.uint8).data)


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    row = dtypes.by_numpy(dtype)
    if row.torch is None:
        raise UnsupportedDtypeError(f"torch has no type for {dtype} arrays")
    return row.torch
