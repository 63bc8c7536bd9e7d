# SPDX-License-Identifier: Apache-2.0
"""`ByteSource`, the bytes of a lazy tensor: fills a buffer, starting at an offset.

The base module of the package. Files, memory, strided views and tensors still at their sender all implement
`ByteSource`; the other modules ask for byte ranges, whatever their origin.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from nvflare_lazy.errors import SourceError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from typing_extensions import Buffer

    from nvflare_lazy.tensors.tensor_file import OpenFile, TensorFile


def bytes_of(buffer: Buffer) -> memoryview:
    """Return a C-contiguous buffer as a flat run of bytes."""
    view = memoryview(buffer)
    # Python casts no view with a zero in its shape.
    return view.cast("B") if view.nbytes else memoryview(bytearray())


class ByteSource(ABC):
    """A fixed run of bytes that can be read at random, from many threads at once.

    A subclass sets `nbytes` and implements `_read_into` and `describe`. It may override `slice` to stay flat,
    `file_range` if the bytes are contiguous in a file, so that the kernel can copy them, and `file` if they are
    computed from the contents of a file.
    """

    nbytes: int

    @abstractmethod
    def _read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill all of `buffer` (bytes, writable, inside the source) from `offset`, or raise a `SourceError`."""

    @abstractmethod
    def describe(self) -> str:
        """Say where the bytes live, in a few words for a person, without any I/O."""

    def read_into(self, buffer: Buffer, offset: int = 0) -> None:
        """Fill `buffer` with the bytes that start at `offset`.

        Args:
            buffer: A writable, C-contiguous buffer, which is filled completely.
            offset: The position of the first byte in this source.
        """
        view = bytes_of(buffer)
        if offset < 0 or offset + len(view) > self.nbytes:
            raise ValueError(
                f"bytes {offset} to {offset + len(view)} are outside {self.describe()}, which has {self.nbytes}"
            )
        if len(view):
            self._read_into(view, offset)

    def read(self, offset: int = 0, count: int | None = None) -> bytearray:
        """Return `count` bytes that start at `offset`. Default: all bytes after it."""
        data = bytearray(self.nbytes - offset if count is None else count)
        self.read_into(data, offset)
        return data

    def slice(self, offset: int, nbytes: int) -> ByteSource:
        """Return the source of a part of this one; it keeps this one alive."""
        if offset == 0 and nbytes == self.nbytes:
            return self
        return SourceSlice(self, offset, nbytes)

    def file_range(self) -> tuple[TensorFile, int] | None:
        """Return the open file and the offset at which it contains the bytes contiguously, or None."""
        return None

    def file(self) -> OpenFile | None:
        """Return the open file that reads of this source use, or None."""
        found = self.file_range()
        return None if found is None else found[0]


def read_elements(
    source: ByteSource, dtype: torch.dtype | np.dtype[Any], buffer: Buffer, start: int, count: int | None
) -> None:
    """Fill a buffer with `count` elements of a source, which it has to hold exactly."""
    view = bytes_of(buffer)
    if count is None:
        count = len(view) // dtype.itemsize
    if count * dtype.itemsize != len(view):
        raise ValueError(f"a buffer of {len(view)} bytes does not hold exactly {count} elements of {dtype}")
    source.read_into(view, start * dtype.itemsize)


class DerivedSource(ByteSource):
    """A source that reads its bytes from another one, `_base`."""

    _base: ByteSource

    def describe(self) -> str:
        return self._base.describe()

    def file(self) -> OpenFile | None:
        return self._base.file()


class SourceSlice(DerivedSource):
    """A part of another source."""

    def __init__(self, base: ByteSource, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > base.nbytes:
            raise ValueError(
                f"bytes {offset} to {offset + nbytes} are outside {base.describe()}, which has {base.nbytes}"
            )
        self._base = base
        self._offset = offset
        self.nbytes = nbytes

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        self._base._read_into(buffer, self._offset + offset)

    def slice(self, offset: int, nbytes: int) -> ByteSource:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are outside a slice of {self.nbytes}")
        return self._base.slice(self._offset + offset, nbytes)

    def file_range(self) -> tuple[TensorFile, int] | None:
        base = self._base.file_range()
        return None if base is None else (base[0], base[1] + self._offset)


class MemorySource(ByteSource):
    """Bytes that are in memory already; kept alive, never copied until they are read."""

    def __init__(self, data: Buffer) -> None:
        #: The bytes, read-only.
        self.view = bytes_of(data).toreadonly()
        self.nbytes = len(self.view)

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        buffer[:] = self.view[offset : offset + len(buffer)]

    def describe(self) -> str:
        return "memory"


class ZeroSource(ByteSource):
    """Zeros that take no memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def describe(self) -> str:
        return "zeros"

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        buffer[:] = bytes(len(buffer))


class FailedSource(ByteSource):
    """A source for bytes that were not received: every read raises the error that explains why.

    A result that could not be received becomes tensors on failed sources, so that the failure costs the one who uses
    the result and not the process that decodes it.
    """

    def __init__(self, nbytes: int, error: Exception) -> None:
        self.nbytes = nbytes
        self.error = error

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        # A copy: an exception that is raised again and again would collect, and keep alive, every frame it passed.
        try:
            error = copy.copy(self.error)
        except Exception:  # its constructor takes other arguments than it keeps
            error = SourceError(f"{type(self.error).__name__}: {self.error}")
        raise error

    def describe(self) -> str:
        return f"nowhere ({self.error})"
