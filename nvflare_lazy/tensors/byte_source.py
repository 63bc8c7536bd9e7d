# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a lazy tensor come from: anything that can fill a buffer from an offset.

The lowest stone of the package. Files, memory, strided views and tensors still at their sender all implement
`ByteSource`; everything above asks for byte ranges and never cares which it was.
"""

from __future__ import annotations

import copy
import os
import weakref
from abc import ABC, abstractmethod
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from nvflare_lazy.errors import ReleasedSourceError, SourceError, TruncatedSourceError
from nvflare_lazy.tensors.shared_work import LEAST_SHARED_BYTES, in_shares

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

# Linux moves at most this much in one read; larger requests come back short.
_MOST_BYTES_A_READ = 0x7FFFF000


def bytes_of(buffer: Buffer) -> memoryview:
    """Return a C-contiguous buffer as a flat run of bytes."""
    view = memoryview(buffer)
    # Python casts no view with a zero in its shape.
    return view.cast("B") if view.nbytes else memoryview(bytearray())


class ByteSource(ABC):
    """A fixed run of bytes that can be read at random, from many threads at once.

    A subclass sets `nbytes` and implements `_read_into` and `describe`. It may override `slice` to stay flat,
    `file_range` if the bytes lie contiguous in a file, so that the kernel can copy them, and `file` if they are made
    from what is in a file.
    """

    nbytes: int

    @abstractmethod
    def _read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill all of `buffer` (bytes, writable, inside the source) from `offset`, or raise a `SourceError`."""

    @abstractmethod
    def describe(self) -> str:
        """Say where the bytes live, in a few words for a person, without any I/O."""

    def read_into(self, buffer: Buffer, offset: int = 0) -> None:
        """Fill `buffer` with the bytes from `offset` on.

        Args:
            buffer: A writable, C-contiguous buffer; all of it is filled.
            offset: Where to start in this source.
        """
        view = bytes_of(buffer)
        if offset < 0 or offset + len(view) > self.nbytes:
            raise ValueError(
                f"bytes {offset} to {offset + len(view)} are outside of {self.describe()}, which has {self.nbytes}"
            )
        if len(view):
            self._read_into(view, offset)

    def read(self, offset: int = 0, count: int | None = None) -> bytearray:
        """Return `count` bytes from `offset` on (all that follow, if no count is given)."""
        data = bytearray(self.nbytes - offset if count is None else count)
        self.read_into(data, offset)
        return data

    def slice(self, offset: int, nbytes: int) -> ByteSource:
        """Return the source of a part of this one; it keeps this one alive."""
        if offset == 0 and nbytes == self.nbytes:
            return self
        return SourceSlice(self, offset, nbytes)

    def file_range(self) -> tuple[OpenFile, int] | None:
        """Return the open file and the offset in it at which the bytes lie contiguous, or None if they do not."""
        return None

    def file(self) -> OpenFile | None:
        """Return the open file that is read when this is, or None if there is none."""
        found = self.file_range()
        return None if found is None else found[0]


class SourceSlice(ByteSource):
    """A part of another source."""

    def __init__(self, base: ByteSource, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > base.nbytes:
            raise ValueError(
                f"bytes {offset} to {offset + nbytes} are outside of {base.describe()}, which has {base.nbytes}"
            )
        self._base = base
        self._offset = offset
        self.nbytes = nbytes

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        self._base._read_into(buffer, self._offset + offset)

    def describe(self) -> str:
        return self._base.describe()

    def slice(self, offset: int, nbytes: int) -> ByteSource:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are outside of a slice of {self.nbytes}")
        return self._base.slice(self._offset + offset, nbytes)

    def file_range(self) -> tuple[OpenFile, int] | None:
        base = self._base.file_range()
        return None if base is None else (base[0], base[1] + self._offset)

    def file(self) -> OpenFile | None:
        return self._base.file()


class MemorySource(ByteSource):
    """Bytes that are in memory already; kept alive, never copied until they are read."""

    def __init__(self, data: Buffer) -> None:
        self._view = bytes_of(data).toreadonly()
        self.nbytes = len(self._view)

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        buffer[:] = self._view[offset : offset + len(buffer)]

    def describe(self) -> str:
        return "memory"


class _Descriptor:
    """A file descriptor that is closed once nobody refers to it any more.

    Closing under a running `pread` would let the kernel hand the number to another file, and the reader that file's
    bytes: so each reader holds a reference. No lock: one that is held while another thread forks stays held in the
    child for good.
    """

    def __init__(self, path: str) -> None:
        # Not blocking: a named pipe would keep us waiting for its other end.
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        # Not at exit: a daemon thread may still be reading then.
        weakref.finalize(self, os.close, self.number).atexit = False


class OpenFile:
    """One read-only descriptor, shared by all the sources that read the file.

    The descriptor is closed when the last source lets go of it. `keep_alive` is released then, too: a scratch lease,
    for one, so that the last reference to a file's tensors frees the directory the file is in.

    Args:
        path: The file; opened at once, and never looked up by name again.
        keep_alive: Anything that must live as long as the file is open.
    """

    def __init__(self, path: str | os.PathLike[str], keep_alive: object = None) -> None:
        self.path = os.fspath(path)
        self._descriptor: _Descriptor | None = _Descriptor(self.path)
        self._held = [keep_alive]
        with self.descriptor() as fd:
            self.size = os.fstat(fd).st_size

    @property
    def closed(self) -> bool:
        """Whether the file has been given back."""
        return self._descriptor is None

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """Lend the descriptor: it stays open until the block is left, whoever closes the file meanwhile."""
        descriptor = self._lent()
        try:
            yield descriptor.number
        finally:
            del descriptor  # the traceback of an error must not keep the file open

    def _lent(self) -> _Descriptor:
        descriptor = self._descriptor
        if descriptor is None:
            raise ReleasedSourceError(f"{self.path} has been released: read its tensors before that, or materialize()")
        return descriptor

    def hold(self, keep_alive: object) -> None:
        """Keep one more object alive for as long as the file is open."""
        self._held.append(keep_alive)

    def close(self) -> None:
        """Give the file back now; reading any source of it raises from then on."""
        self._descriptor = None
        self._held.clear()

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset` of the file on."""
        descriptor = self._lent()
        try:
            if len(buffer) < LEAST_SHARED_BYTES:
                self._read_part(descriptor.number, buffer, offset)
            else:
                in_shares(partial(self._read_share, descriptor.number, buffer, offset), len(buffer))
        finally:
            del descriptor  # the traceback of an error must not keep the file open

    def _read_share(self, fd: int, buffer: memoryview, offset: int, begin: int, end: int) -> None:
        self._read_part(fd, buffer[begin:end], offset + begin)

    def _read_part(self, fd: int, buffer: memoryview, offset: int) -> None:
        while rest := len(buffer):
            try:
                count = os.preadv(fd, (buffer[:_MOST_BYTES_A_READ],), offset)
            except OSError as error:
                raise SourceError(f"cannot read {self.path}: {error}") from error
            if count == rest:
                return
            if count == 0:
                raise TruncatedSourceError(
                    f"{self.path} ends at byte {offset}, {rest} bytes before the tensor does: "
                    "the file was cut short after it was opened"
                )
            buffer, offset = buffer[count:], offset + count


class FileSource(ByteSource):
    """A contiguous part of a file, read with `pread` on a shared descriptor."""

    def __init__(self, file: OpenFile, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > file.size:
            raise TruncatedSourceError(
                f"{file.path} has {file.size} bytes, but a tensor in it should lie at {offset} to {offset + nbytes}"
            )
        self._file = file
        self._offset = offset
        self.nbytes = nbytes

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        self._file.read_into(buffer, self._offset + offset)

    def describe(self) -> str:
        return self._file.path

    def slice(self, offset: int, nbytes: int) -> ByteSource:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are outside of a tensor of {self.nbytes} bytes")
        if nbytes == self.nbytes:
            return self
        return FileSource(self._file, self._offset + offset, nbytes)

    def file_range(self) -> tuple[OpenFile, int] | None:
        return self._file, self._offset


class FailedSource(ByteSource):
    """Stands where bytes should be that never came: any use raises the error that says why.

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
        except Exception:  # its constructor does not take what it was made of
            error = SourceError(f"{type(self.error).__name__}: {self.error}")
        raise error

    def describe(self) -> str:
        return f"nowhere ({self.error})"


def open_source(path: str | os.PathLike[str]) -> FileSource:
    """Open a whole file as one source."""
    file = OpenFile(path)
    return FileSource(file, 0, file.size)
