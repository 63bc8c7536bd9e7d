# SPDX-License-Identifier: Apache-2.0
"""Zeros that take no room: what control variates and the like are before the first round."""

from __future__ import annotations

from nvflare_lazy.tensors.byte_source import ByteSource
from nvflare_lazy.tensors.tensor_entry import TensorEntry


class Zeros(ByteSource):
    """Bytes that are all zero.

    Args:
        nbytes: How many.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def describe(self) -> str:
        return "zeros"

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        buffer[:] = bytes(len(buffer))


def zeros_like(entry: TensorEntry) -> TensorEntry:
    """Return the recipe of a tensor of zeros, of the same type and shape."""
    return TensorEntry(Zeros(entry.nbytes), entry.dtype, tuple(entry.shape))
