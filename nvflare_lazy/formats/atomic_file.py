# SPDX-License-Identifier: Apache-2.0
"""`AtomicFile`: a new file that gets its name when it is complete, so readers see the complete file or none.

All checkpoints are written with it. If the file system supports it, the file has no name at all until then, so that the
kernel removes it with the process, even after `kill -9`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import stat
import threading
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from nvflare_lazy.errors import DiskFullError, SaveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Buffer, Self

    from nvflare_lazy.tensors.tensor_file import TensorFile

#: Errors of a full disk, or of an exceeded quota.
OUT_OF_SPACE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
# What file systems answer that have no files without names (NFS, 9p, FUSE), and kernels that know none.
_NO_NAMELESS_FILES = frozenset((errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS))
# Linux moves at most this much in one write; larger requests come back short.
_MAX_WRITE_BYTES = 0x7FFFF000
_FLUSH_BYTES = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class AtomicFile:
    """A file that is written next to its target. Its permissions are 0666 without the bits of the umask.

    Args:
        path: The target; a symbolic link is followed. An existing file stays until then, and is replaced
            atomically.
        fsync: Whether the caller will use `sync`: then the disk starts to write early, which shortens the wait in the
            end.
        existing: A complete file, which gets this path as another name instead of being copied. Raises `OSError` if it
            is removed, or on another file system.
        hidden: The path of the file until then, which other processes can open. Default: none, if the file system
            supports files without names.

    Example:
        >>> with AtomicFile("model.safetensors") as file:
        ...     file.write_at(data, 0)
        ...     file.sync()
        ...     file.publish()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fsync: bool = True,
        existing: TensorFile | None = None,
        hidden: str | None = None,
    ) -> None:
        self.fsync = fsync
        self.path = os.path.realpath(path)
        _refuse_irregular(self.path)
        self.directory, self._name = os.path.split(self.path)
        self._is_shared = hidden is not None
        if existing is None:
            self._fd, self._hidden = _create(self.directory, self._name, hidden)
        else:
            self._fd, self._hidden = _add_name(existing, _hidden_name(self.directory, self._name))
        self._discard: Callable[[], object] = weakref.finalize(self, _remove, self._fd, self._hidden)
        self._identity = os.fstat(self._fd)
        self._lock = threading.Lock()
        self._users = 0
        self._unflushed = 0
        self._published = False
        self._closed = False

    @property
    def unfinished_path(self) -> str:
        """Where another process can open the file until it is published."""
        assert self._hidden is not None
        return self._hidden

    def forget_name(self) -> None:
        """Never publish the file: it leaves no trace, even after `kill -9`."""
        if self._hidden is not None:
            os.unlink(self._hidden)

    def reserve(self, nbytes: int) -> None:
        """Reserve disk space, or raise now if the disk is full.

        Writing a gigabyte to a file that has its room took two thirds of the time. Python's own `posix_fallocate` would
        write the whole file where the file system cannot reserve; this does nothing there.
        """
        with self.descriptor() as fd:
            if nbytes and _fallocate is not None and _fallocate(fd, 0, 0, nbytes) != 0:
                number = ctypes.get_errno()
                if number in OUT_OF_SPACE:
                    raise OSError(number, os.strerror(number))
            if self._is_shared:
                # An NFS client that writes beyond the end of a file may write zeros around its bytes.
                os.ftruncate(fd, nbytes)

    def write_at(self, data: Buffer, offset: int) -> None:
        """Write all of `data` at `offset`; from many threads, if they like."""
        view = memoryview(data).cast("B")
        done = 0
        fd = self._borrow()
        try:
            while done < len(view):
                done += os.pwrite(fd, view[done : done + _MAX_WRITE_BYTES], offset + done)
            self._unflushed += done
            if self.fsync and self._unflushed >= _FLUSH_BYTES:
                self._unflushed = 0
                begin_writeback(fd)
        except OSError as error:
            if error.errno in OUT_OF_SPACE:
                raise self._disk_full(error) from error
            raise
        finally:
            self._give_back()

    def sync(self) -> None:
        """Wait until the written data is on the disk."""
        with self.descriptor() as fd:
            os.fsync(fd)

    def publish(self, name: str | None = None) -> str:
        """Give the file its name, or another one in the same directory, and replace the file of that name.

        Later writes raise.

        Returns:
            Where it is.
        """
        target = os.path.join(self.directory, name or self._name)
        hidden = self._hidden or _hidden_name(self.directory, self._name)
        with self.descriptor() as fd:
            try:
                if self._hidden is None:
                    _link(fd, hidden)
                os.replace(hidden, target)
            except BaseException:
                with suppress(OSError):
                    os.unlink(hidden)
                raise
            self._published = True
        self.path = target
        return target

    def duplicate(self) -> int:
        """Return one more descriptor of the file, for reading it after `close()`; the caller closes it."""
        if self._is_shared:
            # Opened again: an NFS client looks only then for what other machines have written.
            return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        return os.dup(self._fd)

    def is_published(self) -> bool:
        """Whether its path leads to this file now."""
        try:
            return os.path.samestat(self._identity, os.stat(self.path))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
                return False
            raise

    def close(self) -> None:
        """Close the file. If it has no name yet, it is removed. Threads that still write to it may finish."""
        with self._lock:
            self._closed = True
            idle = not self._users
        if self._hidden is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._hidden)
        if idle:
            self._discard()

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """Lend the descriptor: it stays open until the block is left. A full disk raises `DiskFullError` there."""
        fd = self._borrow()
        try:
            yield fd
        except OSError as error:
            if error.errno in OUT_OF_SPACE:
                raise self._disk_full(error) from error
            raise
        finally:
            self._give_back()

    def _borrow(self) -> int:
        with self._lock:
            if self._closed or self._published:
                raise SaveError(f"{self.path}: a write after the save ended or was cancelled")
            self._users += 1
        return self._fd

    def _disk_full(self, error: OSError) -> DiskFullError:
        return DiskFullError(
            error.errno,
            f"no space for {self.path} ({error.strerror}), nothing was written; free some space, or save elsewhere",
        )

    def _give_back(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._closed and not self._users
        if last:
            # Closed under a running write, the number could be another file's by now.
            self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def begin_writeback(fd: int) -> None:
    """Have the kernel begin to write a file's dirty pages to the disk, without waiting for it.

    Writing a gigabyte and flushing it took half as long with this, see `benchmarks/save_safetensors.py`.
    """
    if _sync_file_range is not None:
        # Advice: if the file system does not take it, flushing takes longer.
        _sync_file_range(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)


def sync_directory(path: str) -> None:
    """Wait until the names in a directory are on the disk."""
    with directory_descriptor(path) as fd:
        os.fsync(fd)


@contextmanager
def directory_descriptor(path: str) -> Iterator[int]:
    """Open a directory for the duration of a block."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def _create(directory: str, name: str, hidden: str | None) -> tuple[int, str | None]:
    """Return the descriptor of a new file, and its hidden name if it has one."""
    if hidden is None:
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o666), None
        except OSError as error:
            if error.errno not in _NO_NAMELESS_FILES:
                raise
        hidden = _hidden_name(directory, name)
    return os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666), hidden


def _add_name(existing: TensorFile, name: str) -> tuple[int, str]:
    """Return a descriptor of a file, which gets another name."""
    with existing.descriptor() as fd:
        os.link(existing.path, name)
        if not existing.is_still_at(name):
            os.unlink(name)
            raise FileNotFoundError(errno.ENOENT, "another file has replaced it", existing.path)
        return os.dup(fd), name


def _refuse_irregular(path: str) -> None:
    """Raise if a path leads to something that a file must not replace, such as a pipe or a device."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # the path does not exist; other problems are reported when the file is created
    if not stat.S_ISREG(mode):
        what = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise SaveError(f"{path} is {what}, which saving would replace; choose another name")


def _hidden_name(directory: str, name: str) -> str:
    start = os.fsdecode(os.fsencode(name)[:200])
    return os.path.join(directory, f".{start}.{secrets.token_hex(8)}.partial")


def _link(fd: int, path: str) -> None:
    with directory_descriptor(os.path.dirname(path)) as directory:
        # Only linkat can name a nameless file, and Python calls it only if it gets a directory descriptor.
        os.link(f"/proc/self/fd/{fd}", os.path.basename(path), dst_dir_fd=directory)


def _remove(fd: int, hidden: str | None) -> None:
    if hidden is not None:
        with suppress(FileNotFoundError):
            os.unlink(hidden)
    os.close(fd)
