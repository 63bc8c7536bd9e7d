# SPDX-License-Identifier: Apache-2.0
"""Files of finished downloads, kept so that later downloads overwrite them.

A round receives as much as the round before. Writing to pages that are already in the page cache is several times as
fast as allocating new ones, and a receiver mostly writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import stat
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from nvflare_lazy.scratch._system import make_private_directory, opened_directory

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

_NAME = "recycled"
# Creating a smaller file is as fast.
_MIN_BYTES = 1 << 20
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class _RecycledFile(NamedTuple):
    name: str
    nbytes: int


class RecycledFiles:
    """The recycled files of one job's directory, whose descriptor is borrowed.

    All methods may be called by a finalizer, in the middle of any other: there are no locks, only a deque. A file that
    cannot be recycled is removed with its directory.
    """

    def __init__(self, job_fd: int) -> None:
        self._job_fd = job_fd
        #: The oldest first.
        self.files: deque[_RecycledFile] = deque()
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes on the disk that removing them would free."""
        return sum(file.nbytes for file in tuple(self.files))

    def recycle(self, directory: str, names: Iterable[str]) -> None:
        """Keep those of these files of a directory that are not open, in any process, and have no other name."""
        if self._closed:
            return
        with contextlib.suppress(OSError), opened_directory(directory, dir_fd=self._job_fd) as fd:
            for name in names:
                self._keep(name, fd)

    def _keep(self, name: str, dir_fd: int) -> None:
        fd = os.open(name, _OPEN, dir_fd=dir_fd)
        try:
            status = os.fstat(fd)
            nbytes = status.st_blocks * 512
            is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
            if nbytes >= _MIN_BYTES and is_plain and _is_open_only_here(fd):
                file = _RecycledFile(secrets.token_hex(8), nbytes)
                with contextlib.suppress(FileExistsError):
                    os.close(make_private_directory(_NAME, dir_fd=self._job_fd))
                with self._opened() as own:
                    os.rename(name, file.name, src_dir_fd=dir_fd, dst_dir_fd=own)
                self.files.append(file)
        finally:
            os.close(fd)

    def take(self, name: str, dir_fd: int) -> int | None:
        """Give a file another name and return it open, with its old bytes; None if there is none."""
        while self.files:
            with contextlib.suppress(IndexError, FileNotFoundError), self._opened() as own:
                os.rename(self.files.pop().name, name, src_dir_fd=own, dst_dir_fd=dir_fd)
                return os.open(name, _OPEN, dir_fd=dir_fd)
        return None

    def remove(self, nbytes: int) -> None:
        """Remove files, the oldest first, until `nbytes` are freed."""
        while nbytes > 0 and self.files:
            with contextlib.suppress(IndexError, FileNotFoundError), self._opened() as own:
                file = self.files.popleft()
                os.unlink(file.name, dir_fd=own)
                nbytes -= file.nbytes

    def close(self) -> None:
        """Keep no more files; the present ones are removed with the job's directory."""
        self._closed = True
        self.files.clear()

    def _opened(self) -> AbstractContextManager[int]:
        return opened_directory(_NAME, dir_fd=self._job_fd)


def _is_open_only_here(fd: int) -> bool:
    """Whether no other descriptor of any process is open for a file: the kernel grants a write lease only then."""
    try:
        # If another process opens it at this moment, the kernel sends this signal, which is ignored by default.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (OSError, AttributeError):  # in use, or not supported by the system or the file system
        return False
    return True
