# SPDX-License-Identifier: Apache-2.0
"""The row-major bytes of a strided view, such as a transposed, sliced or expanded tensor in a file.

Used wherever a view is read by tiles. No read holds more of the storage than a block, and the bytes between the
elements are skipped where skipping is cheaper than reading them.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from nvflare_lazy.tensors.byte_source import DerivedSource
from nvflare_lazy.tensors.tensor_memory import extent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvflare_lazy.tensors.byte_source import ByteSource


# The largest single read from the storage.
_BLOCK_BYTES = 4 << 20
# A gap of up to this size is read as well: a system call costs as much.
_CHEAP_BYTES = 64 << 10
# Reading this many times the needed bytes is still faster than one read per run.
_CHEAP_RATIO = 4


class StridedSource(DerivedSource):
    """The elements of a view over `base`, in row-major order.

    Strides and offset count elements; none is negative.
    """

    def __init__(
        self,
        base: ByteSource,
        itemsize: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        storage_offset: int,
    ) -> None:
        check_geometry(base, itemsize, shape, strides, storage_offset)
        self._base = base
        self._shape = shape
        self._strides = strides
        self._first = storage_offset
        self._itemsize = itemsize
        self._element: np.dtype[Any] = np.dtype(f"u{itemsize}" if itemsize in (1, 2, 4, 8) else f"V{itemsize}")
        self.nbytes = prod(shape) * itemsize

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        start, skipped = divmod(offset, self._itemsize)
        stop = -(-(offset + len(buffer)) // self._itemsize)
        if skipped or len(buffer) % self._itemsize:
            whole = bytearray((stop - start) * self._itemsize)
            self._gather_range(memoryview(whole), start, stop)
            buffer[:] = memoryview(whole)[skipped : skipped + len(buffer)]
        else:
            self._gather_range(buffer, start, stop)

    def _gather_range(self, buffer: memoryview, start: int, stop: int) -> None:
        """Fill `buffer` with the elements `start` to `stop`, counted in row-major order."""
        target = np.frombuffer(buffer, dtype=self._element)
        done = 0
        for first, shape in _boxes(self._shape, self._strides, start, stop):
            count = prod(shape)
            strides = self._strides[len(self._strides) - len(shape) :]
            self._gather_box(target[done : done + count].reshape(shape), self._first + first, strides)
            done += count

    def _gather_box(self, target: np.ndarray[Any, Any], first: int, strides: tuple[int, ...]) -> None:
        """Fill `target`, split along the widest stride until each read contains few bytes that are not needed."""
        pending = [(target, first)]
        while pending:
            part, at = pending.pop()
            if part.flags.c_contiguous and is_contiguous(part.shape, strides):
                self._base.read_into(part.reshape(-1).view(np.uint8).data, at * self._itemsize)
                continue
            span = extent(part.shape, strides)
            if self._is_cheap(span, part.size):
                block = np.empty(span, dtype=self._element)
                self._base.read_into(block.view(np.uint8).data, at * self._itemsize)
                byte_strides = [stride * self._itemsize for stride in strides]
                part[...] = np.lib.stride_tricks.as_strided(block, part.shape, byte_strides)
                continue
            axis = max((stride, axis) for axis, stride in enumerate(strides) if part.shape[axis] > 1)[1]
            middle = part.shape[axis] // 2
            low, high = np.split(part, [middle], axis=axis)
            pending += [(high, at + middle * strides[axis]), (low, at)]

    def _is_cheap(self, span: int, wanted: int) -> bool:
        span_bytes = span * self._itemsize
        return span_bytes <= _CHEAP_BYTES or (span_bytes <= _BLOCK_BYTES and span <= _CHEAP_RATIO * wanted)


def check_geometry(
    base: ByteSource, itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...], storage_offset: int
) -> None:
    """Raise ValueError unless the view is inside the storage."""
    if len(shape) != len(strides):
        raise ValueError(f"a view of shape {shape} cannot have strides {strides}")
    if storage_offset < 0 or (shape and (min(shape) < 0 or min(strides) < 0)):
        raise ValueError(f"shape {shape}, strides {strides} and offset {storage_offset} must not be negative")
    end = (storage_offset + extent(shape, strides)) * itemsize
    if 0 not in shape and end > base.nbytes:
        raise ValueError(
            f"a view of shape {shape}, strides {strides} and offset {storage_offset} ends at byte {end}, "
            f"but its storage ({base.describe()}) has {base.nbytes}"
        )


@lru_cache
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a view's elements are stored contiguously, in row-major order."""
    expected = contiguous_strides(shape)
    return 0 in shape or all(
        size == 1 or stride == wanted for size, stride, wanted in zip(shape, strides, expected, strict=True)
    )


def _boxes(
    shape: tuple[int, ...], strides: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Cut the row-major range `start:stop` of `shape` into boxes over its trailing axes, in order.

    Yields the storage index of a box's first element, relative to the view's, and the box's shape.
    """
    if start >= stop:
        return
    if not shape:
        yield 0, ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside a single row
        index = start // row
        yield from _shifted(index * strides[0], shape, strides, start - index * row, stop - index * row)
        return
    if start < first * row:
        index = first - 1
        yield from _shifted(index * strides[0], shape, strides, start - index * row, row)
    if first < last:
        yield first * strides[0], (last - first, *shape[1:])
    if last * row < stop:
        yield from _shifted(last * strides[0], shape, strides, 0, stop - last * row)


def _shifted(
    shift: int, shape: tuple[int, ...], strides: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    for first, box in _boxes(shape[1:], strides[1:], start, stop):
        yield shift + first, box
