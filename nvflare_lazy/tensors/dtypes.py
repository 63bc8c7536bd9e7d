# SPDX-License-Identifier: Apache-2.0
"""The table of element types: their names in safetensors, torch and NumPy, and their widths.

Every size in the package is computed here, so that a sub-byte or an 8-bit float type is right everywhere or nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nvflare_lazy.errors import UnsupportedDtypeError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class ElementType:
    """One row of the table.

    Attributes:
        name: Name of the type in a safetensors header, or None if the format does not have it.
        bits: Width of one element, as the format counts elements.
        torch: The torch dtype, or None if torch does not have it.
        numpy: The NumPy dtype, or None if NumPy does not have it.
        packed: Number of format elements in a torch element: 2 for F4, whose torch dtype holds a pair in each byte.
    """

    name: str | None
    bits: int
    torch: torch.dtype | None
    numpy: np.dtype[Any] | None
    packed: int = 1


def _row(name: str | None, bits: int, torch_name: str | None, numpy_name: str | None, packed: int = 1) -> ElementType:
    # Older torch releases lack the newest 8-bit and 4-bit floats: their rows keep the width and lose the torch dtype.
    torch_dtype = getattr(torch, torch_name, None) if torch_name else None
    return ElementType(name, bits, torch_dtype, np.dtype(numpy_name) if numpy_name else None, packed)


ELEMENT_TYPES: tuple[ElementType, ...] = (
    _row("BOOL", 8, "bool", "bool"),
    _row("U8", 8, "uint8", "uint8"),
    _row("I8", 8, "int8", "int8"),
    _row("U16", 16, "uint16", "uint16"),
    _row("I16", 16, "int16", "int16"),
    _row("U32", 32, "uint32", "uint32"),
    _row("I32", 32, "int32", "int32"),
    _row("U64", 64, "uint64", "uint64"),
    _row("I64", 64, "int64", "int64"),
    _row("F16", 16, "float16", "float16"),
    _row("BF16", 16, "bfloat16", None),
    _row("F32", 32, "float32", "float32"),
    _row("F64", 64, "float64", "float64"),
    _row("C64", 64, "complex64", "complex64"),
    _row("F8_E4M3", 8, "float8_e4m3fn", None),
    _row("F8_E5M2", 8, "float8_e5m2", None),
    _row("F8_E4M3FNUZ", 8, "float8_e4m3fnuz", None),
    _row("F8_E5M2FNUZ", 8, "float8_e5m2fnuz", None),
    _row("F8_E8M0", 8, "float8_e8m0fnu", None),
    _row("F4", 4, "float4_e2m1fn_x2", None, packed=2),
    _row("F6_E2M3", 6, None, None),
    _row("F6_E3M2", 6, None, None),
    # PyTorch checkpoints and NumPy payloads hold these two; safetensors has no name for them.
    _row(None, 128, "complex128", "complex128"),
    _row(None, 32, "complex32", None),
)

_BY_NAME = {row.name: row for row in ELEMENT_TYPES if row.name}
_BY_TORCH = {row.torch: row for row in ELEMENT_TYPES if row.torch is not None}
_BY_NUMPY = {row.numpy: row for row in ELEMENT_TYPES if row.numpy is not None}


def by_name(name: str) -> ElementType | None:
    """Return the row of a safetensors dtype name, or None if the format does not know it."""
    return _BY_NAME.get(name)


def by_spelling(spelling: object) -> ElementType | None:
    """Return the row of a type in any spelling: "BF16", "bf16", "bfloat16", "torch.bfloat16", `torch.bfloat16`."""
    if isinstance(spelling, torch.dtype):
        return _BY_TORCH.get(spelling)
    if not isinstance(spelling, str):
        return None
    named = getattr(torch, spelling.removeprefix("torch."), None)
    return _BY_NAME.get(spelling.upper()) or (_BY_TORCH.get(named) if isinstance(named, torch.dtype) else None)


def by_torch(dtype: torch.dtype) -> ElementType:
    """Return the row of a torch dtype."""
    try:
        return _BY_TORCH[dtype]
    except KeyError:
        raise UnsupportedDtypeError(f"tensor files do not support {dtype}; convert the tensor first") from None


def by_numpy(dtype: np.dtype[Any]) -> ElementType:
    """Return the row of a NumPy dtype, whatever its byte order."""
    try:
        return _BY_NUMPY[dtype.newbyteorder("=")]
    except (KeyError, TypeError):
        raise UnsupportedDtypeError(f"tensor files do not support {dtype} arrays; convert them first") from None


def nbytes(row: ElementType, shape: Sequence[int]) -> int | None:
    """Return the bytes that `shape` takes in the format, or None if a sub-byte type would not end on a whole byte."""
    bits = row.bits * prod(shape)
    return bits // 8 if bits % 8 == 0 else None
