# SPDX-License-Identifier: Apache-2.0
"""NumPy scalars and arrays in the pickle of a checkpoint, from their bytes; no NumPy function of the file's choosing.

Best metrics and the states of random number generators are often saved beside the tensors. Only plain numbers are
taken; they end up among the extras of what was opened.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

import numpy as np

from nvflare_lazy.formats.pickled_tensors import integers

# Booleans, integers, floats and complex numbers of the usual widths; objects, records and strings are not numbers.
_NUMBER = re.compile(r"[<>=|]?(b1|\?|[iu][1248]|f[248]|c8|c16)")
_BYTE_ORDERS = ("<", ">", "|", "=")


class PickledDtype:
    """A dtype while its pickle is read: first its kind, and then, as state, its byte order."""

    def __init__(self, code: object, align: object = False, copy: object = False) -> None:
        if type(code) is not str or not _NUMBER.fullmatch(code):
            raise ValueError("its elements are not plain numbers")
        self.dtype: np.dtype[Any] = np.dtype(code)

    def set_state(self, state: object) -> None:
        """Take the byte order; whatever else is in a dtype's state belongs to records."""
        if type(state) is not tuple or len(state) < 3 or state[2] is not None:
            raise ValueError("its elements are not plain numbers")
        if state[1] not in _BYTE_ORDERS:
            raise ValueError("its byte order is none")
        self.dtype = self.dtype.newbyteorder(state[1])


class PickledArray:
    """An array while its pickle is read: first empty, and then, as state, its shape and bytes."""

    def __init__(self, *_: object) -> None:
        self.array: np.ndarray[Any, Any] = np.empty(0)

    def set_state(self, state: object) -> None:
        """Take (version, shape, dtype, whether in Fortran order, bytes)."""
        if type(state) is not tuple or len(state) != 5:
            raise ValueError("its state is not that of an array")
        _, shape, dtype, fortran, data = state
        self.array = _from_bytes(data, dtype, shape, "F" if fortran is True else "C")


def from_buffer(data: object, dtype: object, shape: object, order: object) -> PickledArray:
    """Rebuild an array the way pickle protocol 5 writes it."""
    made = PickledArray()
    made.array = _from_bytes(data, dtype, shape, "F" if order == "F" else "C")
    return made


def scalar(dtype: object, data: object) -> bool | int | float | complex:
    """Rebuild a NumPy scalar as the Python number it is."""
    number: bool | int | float | complex = _from_bytes(data, dtype, (), "C").item()
    return number


def _from_bytes(data: object, dtype: object, shape: object, order: Any) -> np.ndarray[Any, Any]:
    if type(dtype) is not PickledDtype:
        raise ValueError("its dtype is none")
    if type(data) not in (bytes, bytearray):
        raise ValueError("its elements are not bytes")
    sizes = integers(shape, "shape")
    if min(sizes, default=0) < 0 or prod(sizes) * dtype.dtype.itemsize != len(data):  # type: ignore[arg-type]
        raise ValueError("its bytes are not as many as its shape says")
    native = np.frombuffer(data, dtype=dtype.dtype)  # type: ignore[call-overload]
    made: np.ndarray[Any, Any] = native.reshape(sizes, order=order)
    return made.astype(made.dtype.newbyteorder("="), copy=False)
