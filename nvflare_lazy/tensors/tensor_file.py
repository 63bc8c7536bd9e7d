# SPDX-License-Identifier: Apache-2.0
"""An open file of tensors: its descriptor, its table of contents, and the objects that it keeps alive.

Readers, writers and received files share one `TensorFile` for all tensors of a file. This module does not load torch,
so that programs that only manage scratch start quickly.
"""

from __future__ import annotations

import mmap
import os
import shutil
import stat
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from nvflare_lazy._text import get_logger
from nvflare_lazy.errors import SourceError, SourceReleasedError, TruncatedSourceError
from nvflare_lazy.tensors._parallel_read import MIN_SHARED_BYTES, parallel_for_ranges
from nvflare_lazy.tensors.byte_source import ByteSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvflare_lazy.tensors.dtypes import ElementType

logger = get_logger(__name__)

# Linux moves at most this much in one read; larger requests come back short.
_MAX_READ_BYTES = 0x7FFFF000
# Below this, reading takes less time than making and removing a mapping.
_MIN_MAPPED_BYTES = 1 << 20
# Of Linux 5.14 and later; the module `mmap` does not name it. An older kernel refuses it, and the bytes are read.
_MADV_POPULATE_READ = 22


class StoredTensor(NamedTuple):
    """Type, shape and position of a tensor in a file or message.

    It does not refer to the file. Scratch is freed by reference counts, and a file that holds its table of contents
    would be part of a cycle, which only the garbage collector frees.

    Attributes:
        element_type: Its element type.
        shape: Its shape, in elements as the format counts them.
        offset: The position of its first byte in the file.
        nbytes: Its size in bytes.
    """

    element_type: ElementType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class TemporaryPath:
    """A file or directory that is removed with the last reference to this object, or by `release()`.

    Args:
        path: The file or directory. It may be created later.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.release: Callable[[], object] = weakref.finalize(self, _remove, self.path, os.getpid())


class _Descriptor:
    """A file descriptor that is closed with the last reference to it.

    Closing under a running `pread` would let the kernel hand the number to another file, and the reader that file's
    bytes: so each reader holds a reference. No lock: one that is held while another thread forks stays held in the
    child for good.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        # Not at exit: a daemon thread may still be reading then.
        weakref.finalize(self, os.close, number).atexit = False


class OpenFile(ABC):
    """An open file, local or remote, with its table of contents and the objects that it keeps alive.

    Args:
        path: The name of the file in messages.
        size: Its size in bytes.
        contents: The tensors of the file by name, in the order of their bytes. Default: not known.
    """

    def __init__(self, path: str, size: int, contents: Mapping[str, StoredTensor] | None = None) -> None:
        self.path = path
        self.size = size
        self.contents = contents
        self._owners: list[object] = []

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes of the file that start at `offset`."""

    @abstractmethod
    def source(self, offset: int, nbytes: int) -> ByteSource:
        """Return a part of the file as a byte source, which keeps the file open."""

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of short ranges, each with its offset and its length."""
        found = []
        for offset, nbytes in ranges:
            data = bytearray(nbytes)
            self.read_into(memoryview(data), offset)
            found.append(bytes(data))
        return found

    def own(self, owner: object) -> None:
        """Keep an object alive for as long as the file is open.

        Args:
            owner: For example the scratch of a download.
        """
        self._owners.append(owner)

    def close(self) -> None:
        """Close the file now and drop its owners; reading any source of it then raises."""
        self._owners.clear()

    def _released(self) -> SourceReleasedError:
        return SourceReleasedError(
            f"{self.path} was released; read its tensors before the release, or call materialize()"
        )


class TensorFile(OpenFile):
    """One descriptor, shared by all the sources that read the file.

    The descriptor is closed with the last source that refers to the file. The file drops its owners then, so that the
    last reference to a file's tensors frees the directory the file is in.

    Args:
        path: The file; opened at once, and never looked up by name again.
        descriptor: An open descriptor of the file, instead of opening `path`. The file closes it.
        contents: The tensors of the file by name, in the order of their bytes. Default: not known.
        shareable: Whether this package wrote the file and no program writes to it again, so that other processes may
            get a link to it. Default: False.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        descriptor: int | None = None,
        contents: Mapping[str, StoredTensor] | None = None,
        shareable: bool = False,
    ) -> None:
        path = os.fspath(path)
        self.shareable = shareable
        if descriptor is None:
            # Not blocking: a named pipe would keep us waiting for its other end.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._descriptor: _Descriptor | None = _Descriptor(descriptor)
        super().__init__(path, os.fstat(descriptor).st_size, contents)

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """Lend the descriptor: it stays open until the block is left, even if the file is closed in the block."""
        descriptor = self._lent()
        try:
            yield descriptor.number
        finally:
            del descriptor  # the traceback of an error must not keep the file open

    def _lent(self) -> _Descriptor:
        descriptor = self._descriptor
        if descriptor is None:
            raise self._released()
        return descriptor

    def is_still_at(self, path: str | os.PathLike[str]) -> bool:
        """Return whether this file is open and has a name at `path`, by device and inode number."""
        try:
            with self.descriptor() as fd:
                return os.path.samestat(os.fstat(fd), os.stat(path))
        except OSError:
            return False

    def close(self) -> None:
        self._descriptor = None
        super().close()

    def map(self, offset: int, nbytes: int) -> memoryview | None:
        """Return a part of the file as memory, for a use that ends before the file is closed; None if it must be read.

        Only large parts of files that this package has finished are mapped: if another program cut a file short, an
        access to its mapping would end this process. The kernel finds all pages now, and if it cannot, such as after an
        error of the disk, the caller reads the bytes and gets the error. Writes to the memory do not reach the file.
        """
        if not self.shareable or nbytes < _MIN_MAPPED_BYTES or sys.platform != "linux":
            return None
        before = offset % mmap.ALLOCATIONGRANULARITY
        descriptor = self._lent()
        try:
            mapping = mmap.mmap(descriptor.number, before + nbytes, mmap.MAP_PRIVATE, offset=offset - before)
            mapping.madvise(_MADV_POPULATE_READ)
        except (OSError, ValueError):  # a ValueError if the file is too short
            return None
        finally:
            del descriptor  # the traceback of an error must not keep the file open
        return memoryview(mapping)[before:]

    def is_in_page_cache(self, offset: int) -> bool:
        """Return whether a byte can be read without the disk; False if the file system cannot tell."""
        with self.descriptor() as fd, suppress(OSError, AttributeError):  # Linux only
            return os.preadv(fd, (bytearray(1),), offset, os.RWF_NOWAIT) == 1
        return False

    @contextmanager
    def direct_descriptor(self) -> Iterator[int]:
        """Lend a descriptor that reads past the page cache; where that is not possible, the one of the file."""
        with self.descriptor() as fd:
            direct = _open_directly(fd)
            try:
                yield fd if direct is None else direct
            finally:
                if direct is not None:
                    os.close(direct)

    def source(self, offset: int, nbytes: int) -> FileSource:
        return FileSource(self, offset, nbytes)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        descriptor = self._lent()
        try:
            if len(buffer) < MIN_SHARED_BYTES:
                self._read_part(descriptor.number, buffer, offset)
            else:
                parallel_for_ranges(partial(self._read_share, descriptor.number, buffer, offset), len(buffer))
        finally:
            del descriptor  # the traceback of an error must not keep the file open

    def _read_share(self, fd: int, buffer: memoryview, offset: int, begin: int, end: int) -> None:
        self._read_part(fd, buffer[begin:end], offset + begin)

    def _read_part(self, fd: int, buffer: memoryview, offset: int) -> None:
        while rest := len(buffer):
            try:
                count = os.preadv(fd, (buffer[:_MAX_READ_BYTES],), offset)
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

    def __init__(self, file: TensorFile, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > file.size:
            raise TruncatedSourceError(
                f"{file.path} has {file.size} bytes, but a tensor in it needs bytes {offset} to {offset + nbytes}"
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
            raise ValueError(f"bytes {offset} to {offset + nbytes} are outside a tensor of {self.nbytes} bytes")
        if nbytes == self.nbytes:
            return self
        return FileSource(self._file, self._offset + offset, nbytes)

    def file_range(self) -> tuple[TensorFile, int] | None:
        return self._file, self._offset


def open_source(path: str | os.PathLike[str]) -> FileSource:
    """Open a whole file as one source."""
    file = TensorFile(path)
    return FileSource(file, 0, file.size)


def _open_directly(fd: int) -> int | None:
    """Open the file of a descriptor again, whatever its name is now; None if it must be read through the page cache."""
    with suppress(OSError, AttributeError):  # Linux only, and not on all file systems
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    return None


def _remove(path: str, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child has the same objects, and drops them at its own time
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("Cannot remove %s: %s. Remove it by hand.", path, error)
