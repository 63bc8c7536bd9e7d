# SPDX-License-Identifier: Apache-2.0
"""A tensor's bytes in another floating-point type, cast as they are read.

Lets a checkpoint be saved narrower or wider than it is without the saver knowing: it reads tiles, and each tile is
rounded on its way, exactly as `torch.Tensor.to` rounds.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from nvflare_lazy.errors import UnsupportedDtypeError
from nvflare_lazy.tensors.byte_source import ByteSource
from nvflare_lazy.tensors.raw_bytes import storage_bytes

if TYPE_CHECKING:
    from nvflare_lazy.tensors.tensor_file import TensorFile

# What is cast at once stays in the cache of a core.
_TILE_ELEMENTS = 1 << 18


class CastSource(ByteSource):
    """The elements of a source in another type.

    Args:
        source: The elements, one after the other.
        from_dtype: Their type.
        to_dtype: The type to read them in; both are floating-point types.

    Example:
        >>> half = CastSource(tensor.source, torch.float32, torch.bfloat16)
        >>> LazyTensor(half, torch.bfloat16, tensor.shape)
    """

    def __init__(self, source: ByteSource, from_dtype: torch.dtype, to_dtype: torch.dtype) -> None:
        check_cast(from_dtype, to_dtype)
        self._source = source
        self._from = from_dtype
        self._to = to_dtype
        self._largest = _largest_that_fits(from_dtype, to_dtype)
        self._lock = threading.Lock()
        self.nbytes = source.nbytes // from_dtype.itemsize * to_dtype.itemsize
        #: Finite values read so far that were too large for the new type: they became infinite or its largest value.
        self.overflows = 0

    def describe(self) -> str:
        return self._source.describe()

    def file(self) -> TensorFile | None:
        return self._source.file()

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        width, done = self._to.itemsize, 0
        while done < len(buffer):
            first, skipped = divmod(offset + done, width)
            wanted = skipped + len(buffer) - done
            tile = self._read_tile(first, min(_TILE_ELEMENTS, -(-wanted // width)))
            part = storage_bytes(tile)[skipped:wanted]
            buffer[done : done + len(part)] = part
            done += len(part)

    def _read_tile(self, first: int, count: int) -> torch.Tensor:
        tile = torch.empty(count, dtype=self._from)
        self._source.read_into(storage_bytes(tile), first * self._from.itemsize)
        if self._largest is not None:
            overflows = _count_larger(tile, self._largest)
            with self._lock:
                self.overflows += overflows
        return tile.to(self._to)


def _count_larger(tile: torch.Tensor, largest: float) -> int:
    """Return how many finite elements are farther from zero than `largest`."""
    # There is no arithmetic on 8-bit floats.
    tile = tile.float() if tile.itemsize == 1 else tile
    low, high = tile.aminmax()
    if -largest <= low and high <= largest:  # not so where there is a NaN
        return 0
    return int(((tile.abs() > largest) & tile.isfinite()).sum())


def check_cast(from_dtype: torch.dtype, to_dtype: torch.dtype) -> None:
    """Raise `UnsupportedDtypeError` unless both are floating-point types and torch can cast one to the other."""
    if not (from_dtype.is_floating_point and to_dtype.is_floating_point):
        raise UnsupportedDtypeError(
            f"{from_dtype} is not cast to {to_dtype}, which loses more than digits: "
            "only floating-point types are cast, to floating-point types"
        )
    try:
        torch.empty(1, dtype=from_dtype).to(to_dtype)
    except NotImplementedError:
        raise UnsupportedDtypeError(f"torch {torch.__version__} cannot cast {from_dtype} to {to_dtype}") from None


def _largest_that_fits(from_dtype: torch.dtype, to_dtype: torch.dtype) -> float | None:
    """Return the largest finite value of the new type, or None if no finite value of the old one is larger."""
    old, new = torch.finfo(from_dtype).max, torch.finfo(to_dtype).max
    return new if new < old else None
