# SPDX-License-Identifier: Apache-2.0
"""Byte sources that convert the elements of another one as they are read.

Saving reads tensors in another floating-point type, rounded tile by tile exactly as `torch.Tensor.to` rounds; opening
a PyTorch file reads storages of big-endian files, and views that are conjugated or negated, as `torch.load` would
return them.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nvflare_lazy.errors import UnsupportedDtypeError
from nvflare_lazy.tensors.byte_source import DerivedSource
from nvflare_lazy.tensors.tensor_memory import storage_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvflare_lazy.tensors.byte_source import ByteSource

# An amount that stays in the cache of a core while it is cast.
_TILE_ELEMENTS = 1 << 18


class CastSource(DerivedSource):
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
        self._base = source
        self._from = from_dtype
        self._to = to_dtype
        self._largest = _largest_that_fits(from_dtype, to_dtype)
        self._lock = threading.Lock()
        self.nbytes = source.nbytes // from_dtype.itemsize * to_dtype.itemsize
        #: Finite values read so far that were too large for the new type: they became infinite or its largest value.
        self.overflows = 0

    def arguments(self) -> tuple[ByteSource, torch.dtype, torch.dtype]:
        """Return the arguments that create an equal source, for example in another process."""
        return self._base, self._from, self._to

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
        self._base.read_into(storage_bytes(tile), first * self._from.itemsize)
        if self._largest is not None:
            overflows = _count_larger(tile, self._largest)
            with self._lock:
                self.overflows += overflows
        return tile.to(self._to)


def _count_larger(tile: torch.Tensor, largest: float) -> int:
    """Return how many finite elements are farther from zero than `largest`."""
    # NumPy and torch have no arithmetic on 8-bit floats.
    tile = tile.float() if tile.itemsize == 1 else tile
    low, high = tile.aminmax()
    if -largest <= low and high <= largest:  # not so where there is a NaN
        return 0
    return int(((tile.abs() > largest) & tile.isfinite()).sum())


def check_cast(from_dtype: torch.dtype, to_dtype: torch.dtype) -> None:
    """Raise `UnsupportedDtypeError` unless both are floating-point types and torch can cast one to the other."""
    if not (from_dtype.is_floating_point and to_dtype.is_floating_point):
        raise UnsupportedDtypeError(
            f"cannot cast {from_dtype} to {to_dtype}, which loses more than digits: "
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


class _ConvertedSource(DerivedSource):
    """Elements of `width` bytes that are changed in place after they were read."""

    def __init__(self, base: ByteSource, width: int) -> None:
        self._base = base
        self._width = width
        self.nbytes = base.nbytes

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        before = offset % self._width
        after = -(offset + len(buffer)) % self._width
        if not before and not after:
            self._base.read_into(buffer, offset)
            self._convert(np.frombuffer(buffer, dtype=np.uint8))
            return
        # Whole elements around the bytes that were asked for; a storage may end in less than one.
        start = offset - before
        stop = min(offset + len(buffer) + after, self.nbytes)
        block = self._base.read(start, stop - start)
        self._convert(np.frombuffer(block, dtype=np.uint8)[: len(block) // self._width * self._width])
        buffer[:] = memoryview(block)[before : before + len(buffer)]

    @abstractmethod
    def _convert(self, elements: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Change whole elements in place."""


class ByteSwappedSource(_ConvertedSource):
    """The bytes of `base` with each number of `width` bytes reversed; a complex element has two numbers."""

    def _convert(self, elements: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        elements.view(f"u{self._width}").byteswap(inplace=True)


class ConjugatedSource(_ConvertedSource):
    """The elements of `base` with the sign of some of their parts changed, as `flipped` says for each part.

    The parts are numbers of `width` bytes in this machine's byte order; a complex element has two.
    """

    def __init__(self, base: ByteSource, width: int, flipped: Sequence[bool]) -> None:
        super().__init__(base, width * len(flipped))
        sign = 1 << (8 * width - 1)
        self._signs = np.array([sign if part else 0 for part in flipped], dtype=f"u{width}")

    def _convert(self, elements: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        parts = elements.view(self._signs.dtype).reshape(-1, len(self._signs))
        np.bitwise_xor(parts, self._signs, out=parts)
