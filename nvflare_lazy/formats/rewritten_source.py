# SPDX-License-Identifier: Apache-2.0
"""Byte sources that change what they read: storages of big-endian files, and views that are conjugated or negated.

They lie between the storage of a checkpoint and the geometry of a tensor, so that every element comes out as
`torch.load` would give it.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from nvflare_lazy.tensors.byte_source import ByteSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvflare_lazy.tensors.tensor_file import TensorFile


class _RewrittenSource(ByteSource):
    """Elements of `width` bytes that are changed in place after they were read."""

    def __init__(self, base: ByteSource, width: int) -> None:
        self._base = base
        self._width = width
        self.nbytes = base.nbytes

    def describe(self) -> str:
        return self._base.describe()

    def file(self) -> TensorFile | None:
        return self._base.file()

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        before = offset % self._width
        after = -(offset + len(buffer)) % self._width
        if not before and not after:
            self._base.read_into(buffer, offset)
            self._rewrite(np.frombuffer(buffer, dtype=np.uint8))
            return
        # Whole elements around the bytes that were asked for; a storage may end in less than one.
        start = offset - before
        stop = min(offset + len(buffer) + after, self.nbytes)
        block = self._base.read(start, stop - start)
        self._rewrite(np.frombuffer(block, dtype=np.uint8)[: len(block) // self._width * self._width])
        buffer[:] = memoryview(block)[before : before + len(buffer)]

    @abstractmethod
    def _rewrite(self, elements: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Change whole elements in place."""


class ByteSwappedSource(_RewrittenSource):
    """The bytes of `base` with each word of `width` bytes turned around.

    Args:
        base: Bytes of a machine of the other byte order.
        width: Bytes of a number: half an element for complex ones.
    """

    def _rewrite(self, elements: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        elements.view(f"u{self._width}").byteswap(inplace=True)


class SignFlippedSource(_RewrittenSource):
    """The elements of `base` with the sign of some of their parts turned.

    Args:
        base: Floating-point or complex numbers of this machine's byte order.
        width: Bytes of a number: half an element for complex ones.
        flipped: For each part of an element, whether its sign is turned.
    """

    def __init__(self, base: ByteSource, width: int, flipped: Sequence[bool]) -> None:
        super().__init__(base, width * len(flipped))
        sign = 1 << (8 * width - 1)
        self._signs = np.array([sign if part else 0 for part in flipped], dtype=f"u{width}")

    def _rewrite(self, elements: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        parts = elements.view(self._signs.dtype).reshape(-1, len(self._signs))
        np.bitwise_xor(parts, self._signs, out=parts)
