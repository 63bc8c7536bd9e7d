# SPDX-License-Identifier: Apache-2.0
"""Conversion between NVFlare's dictionaries of weights and entries of lazy tensors.

NVFlare's components exchange plain dictionaries of tensors or NumPy arrays. All weights that enter or leave this
package in a job are converted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from nvflare_lazy.errors import UnsupportedDtypeError
from nvflare_lazy.tensors.byte_source import ZeroSource
from nvflare_lazy.tensors.converted_sources import CastSource
from nvflare_lazy.tensors.entry import TensorEntry, entry_of
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor


def is_weight(value: object) -> bool:
    """Whether a value is a tensor or an array, lazy or not."""
    return isinstance(value, torch.Tensor) or is_array(value)


def is_array(value: object) -> bool:
    """Whether a value is a NumPy array rather than a tensor."""
    return isinstance(value, (np.ndarray, np.generic))


def is_lazy(value: object) -> bool:
    """Whether a value is a lazy tensor or a lazy array."""
    return isinstance(value, (LazyTensor, LazyArray))


def entries_of(weights: Mapping[str, Any]) -> dict[str, TensorEntry]:
    """Return the entries of all tensors or arrays of a model."""
    return {name: entry_of(value) for name, value in weights.items()}


def as_weights(entries: Mapping[str, TensorEntry], *, numpy: bool) -> dict[str, Any]:
    """Return lazy tensors, or lazy arrays, for NVFlare to pass on.

    Args:
        entries: The entries.
        numpy: Whether the job exchanges NumPy arrays. Types that NumPy lacks, such as bfloat16, become float32, as
            with NVFlare's own persistor.
    """
    if not numpy:
        return {name: entry.lazy() for name, entry in entries.items()}
    return {name: _as_array(name, entry) for name, entry in entries.items()}


def holds_arrays(weights: Mapping[str, Any]) -> bool:
    """Whether the values are NumPy arrays rather than tensors."""
    return any(map(is_array, weights.values()))


def zero_controls(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return SCAFFOLD's first control variates for a model."""
    zeros = {name: entry.over(ZeroSource(entry.source.nbytes)) for name, entry in entries_of(model).items()}
    return as_weights(zeros, numpy=holds_arrays(model))


def _as_array(name: str, entry: TensorEntry) -> LazyArray:
    if entry.element_type.numpy is not None:
        return entry.array()
    try:
        wider = CastSource(entry.rows(), entry.dtype, torch.float32)
    except UnsupportedDtypeError as error:
        raise UnsupportedDtypeError(
            f"tensor {name!r}: {error}; exchange PyTorch tensors instead (server_expected_format='pytorch')"
        ) from None
    return LazyArray(wider, np.float32, entry.shape)
