# SPDX-License-Identifier: Apache-2.0
"""A tensor as a safetensors file holds it: its type, its shape as the format counts elements, and its bytes.

Used for saving; the conversion of a value is `tensors.entry`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import UnserializableTensorError, UnsupportedDtypeError, UnsupportedTensorError
from nvflare_lazy.formats.safetensors_layout import TensorMeta
from nvflare_lazy.tensors import dtypes
from nvflare_lazy.tensors.converted_sources import CastSource, check_cast
from nvflare_lazy.tensors.entry import entry_of, geometry_of

if TYPE_CHECKING:
    import torch

    from nvflare_lazy.tensors.byte_source import ByteSource
    from nvflare_lazy.tensors.dtypes import ElementType


def meta_of(name: str, value: object, *, dtype: torch.dtype | None = None) -> TensorMeta:
    """Return what the header of a file contains about a tensor.

    Args:
        name: Its name.
        value: A tensor, array or entry, whose bytes are not read.
        dtype: The type that floating-point tensors are cast to.
    """
    try:
        element_type, shape = geometry_of(value)
        if _is_cast(element_type, dtype):
            assert dtype is not None
            check_cast(_torch_type(element_type, dtype), dtype)
            element_type = dtypes.by_torch(dtype)
    except UnsupportedDtypeError as error:
        raise UnsupportedDtypeError(f"tensor {quoted(name)}: {error}") from None
    except UnsupportedTensorError as error:
        raise UnserializableTensorError(f"{quoted(name)} cannot be saved: {error}") from None
    if element_type.name is None:
        raise UnsupportedDtypeError(
            f"tensor {quoted(name)} is {element_type.torch}, which safetensors files cannot hold: convert it first, "
            "for example with .to(torch.complex64)"
        )
    if element_type.packed != 1:
        if not shape:
            raise UnserializableTensorError(
                f"tensor {quoted(name)} is a single {element_type.torch}: it holds {element_type.packed} elements"
            )
        shape = (*shape[:-1], shape[-1] * element_type.packed)
    return TensorMeta(name, element_type.name, shape)


def bytes_of(name: str, value: object, *, dtype: torch.dtype | None = None) -> ByteSource:
    """Return the bytes that a file contains of a tensor, unread."""
    try:
        entry = entry_of(value)
    except UnsupportedTensorError as error:
        raise UnserializableTensorError(f"{quoted(name)} cannot be saved: {error}") from None
    if not _is_cast(entry.element_type, dtype):
        return entry.rows()
    assert dtype is not None
    return CastSource(entry.rows(), entry.dtype, dtype)


def _is_cast(element_type: ElementType, dtype: torch.dtype | None) -> bool:
    known = element_type.torch
    return dtype is not None and known != dtype and (known is None or known.is_floating_point)


def _torch_type(element_type: ElementType, dtype: torch.dtype) -> torch.dtype:
    if element_type.torch is None:
        raise UnsupportedDtypeError(f"torch cannot cast {element_type.name} to {dtype}")
    return element_type.torch
