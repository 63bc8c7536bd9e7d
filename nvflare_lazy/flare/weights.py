# SPDX-License-Identifier: Apache-2.0
"""A model's weights as NVFlare passes them around, and as recipes of lazy tensors.

NVFlare's components hand each other plain dictionaries of tensors or of NumPy arrays. Whatever enters or leaves this
package in a job goes through here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from nvflare_lazy.errors import UnsupportedDtypeError
from nvflare_lazy.formats.converted_sources import CastSource
from nvflare_lazy.tensors import dtypes
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.tensors.tensor_entry import TensorEntry


def is_weight(value: object) -> bool:
    """Whether a value is a tensor or an array, lazy or not."""
    return isinstance(value, (torch.Tensor, np.ndarray, np.generic))


def is_lazy(value: object) -> bool:
    """Whether a value is a lazy tensor or a lazy array."""
    return isinstance(value, (LazyTensor, LazyArray))


def entry_of(value: Any) -> TensorEntry:
    """Return the recipe of a tensor or array, lazy or not; of an ordinary one it refers to the same memory."""
    if isinstance(value, LazyTensor):
        return TensorEntry(value.source, value.dtype, tuple(value.shape))
    if isinstance(value, LazyArray) and value.dtype.isnative:
        return TensorEntry(value.source, _torch_dtype(value.dtype), value.shape)
    if isinstance(value, torch.Tensor):
        return entry_of(LazyTensor.from_tensor(value.contiguous()))
    array = np.asarray(value)
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
    return TensorEntry(MemorySource(little.view(np.uint8).data), _torch_dtype(array.dtype), array.shape)


def entries_of(weights: Mapping[str, Any]) -> dict[str, TensorEntry]:
    """Return the recipes of all tensors or arrays of a model."""
    return {name: entry_of(value) for name, value in weights.items()}


def geometry_of(value: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype, as torch calls it, and the shape of a tensor or array, without reading it."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape)
    return _torch_dtype(np.dtype(value.dtype)), tuple(value.shape)


def as_weights(entries: Mapping[str, TensorEntry], *, numpy: bool) -> dict[str, Any]:
    """Return lazy tensors, or lazy arrays, for NVFlare to pass on.

    Args:
        entries: The recipes.
        numpy: Whether the job exchanges NumPy arrays. Types that NumPy has not, such as bfloat16, become float32, as
            they do with NVFlare's own persistor.
    """
    if not numpy:
        return {name: entry.lazy() for name, entry in entries.items()}
    return {name: _as_array(name, entry) for name, entry in entries.items()}


def holds_arrays(weights: Mapping[str, Any]) -> bool:
    """Whether the values are NumPy arrays rather than tensors."""
    return any(isinstance(value, (np.ndarray, np.generic)) for value in weights.values())


def _as_array(name: str, entry: TensorEntry) -> LazyArray:
    if dtypes.by_torch(entry.dtype).numpy is not None:
        return entry.array()
    try:
        wider = CastSource(entry.lazy().source, entry.dtype, torch.float32)
    except UnsupportedDtypeError as error:
        raise UnsupportedDtypeError(
            f"tensor {name!r}: {error}; exchange PyTorch tensors instead (server_expected_format='pytorch')"
        ) from None
    return LazyArray(wider, np.float32, entry.shape)


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    found = dtypes.by_numpy(dtype).torch
    if found is None:
        raise UnsupportedDtypeError(f"torch has no dtype for NumPy's {dtype}")
    return found
