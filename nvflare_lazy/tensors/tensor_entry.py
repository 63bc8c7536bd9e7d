# SPDX-License-Identifier: Apache-2.0
"""The recipe of a lazy tensor: source, dtype and geometry, before anybody asked for the tensor itself.

Readers and receivers make entries by the ten thousand, which costs next to nothing; `LazyTensorDict` turns the ones
that are asked for into lazy tensors.
"""

from __future__ import annotations

import os
import threading
import weakref
from math import prod
from typing import TYPE_CHECKING

from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor

if TYPE_CHECKING:
    import torch

    from nvflare_lazy.tensors.byte_source import ByteSource


# Two threads that ask for the same entry get the same tensor. Reentrant, as the garbage collector may come by.
_publishing = threading.RLock()
os.register_at_fork(after_in_child=_publishing._at_fork_reinit)  # type: ignore[attr-defined]


class TensorEntry:
    """What it takes to make one lazy tensor.

    Args:
        source: The storage that the geometry refers to.
        dtype: The element type.
        shape: The shape.
        strides: Strides in elements, or None for a row-major tensor.
        storage_offset: First element in the storage.
    """

    __slots__ = ("_made", "dtype", "shape", "source", "storage_offset", "strides")

    def __init__(
        self,
        source: ByteSource,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        storage_offset: int = 0,
    ) -> None:
        self.source = source
        self.dtype = dtype
        self.shape = shape
        self.strides = strides
        self.storage_offset = storage_offset
        self._made: weakref.ref[LazyTensor] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements, views of larger storages counted by what they show."""
        return self.numel * self.dtype.itemsize

    def over(self, source: ByteSource) -> TensorEntry:
        """Return the same recipe for another storage."""
        return TensorEntry(source, self.dtype, self.shape, self.strides, self.storage_offset)

    def lazy(self) -> LazyTensor:
        """Return the lazy tensor; the same object as long as somebody holds it, so that tied tensors stay tied."""
        made = self._made() if self._made is not None else None
        if made is None:
            if self.strides is None and not self.storage_offset and self.nbytes == self.source.nbytes:
                made = LazyTensor.of_whole(self.source, self.dtype, self.shape)
            else:
                made = LazyTensor(
                    self.source, self.dtype, self.shape, strides=self.strides, storage_offset=self.storage_offset
                )
            with _publishing:
                other = self._made() if self._made is not None else None
                if other is not None:
                    return other
                self._made = weakref.ref(made)
        return made

    def array(self) -> LazyArray:
        """Return the same elements as a lazy NumPy array."""
        return LazyArray.from_lazy_tensor(self.lazy())
