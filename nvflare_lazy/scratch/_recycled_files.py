# SPDX-License-Identifier: Apache-2.0
"""Files of downloads that are over, kept to be written over by the next ones.

A round receives as much as the round before. Writing to pages that the page cache has already is several times as fast
as having it find new ones, and most of what a receiver does is writing.
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

from nvflare_lazy.scratch._system import make_private_directory, open_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_NAME = "spare"
# A smaller file is as fast made anew.
_LEAST_BYTES = 1 << 20
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class _Spare(NamedTuple):
    name: str
    nbytes: int


class SpareFiles:
    """The spare files of one job's directory.

    All methods may be called by a finalizer, in the middle of any other: there are no locks, only a deque. What cannot
    be kept is not: whoever releases a directory removes what is left in it.

    Args:
        job_fd: The job's directory, open; borrowed.
    """

    def __init__(self, job_fd: int) -> None:
        self._job_fd = job_fd
        self._files: deque[_Spare] = deque()
        self._closed = False

    def __bool__(self) -> bool:
        return bool(self._files)

    @property
    def nbytes(self) -> int:
        """Bytes on the disk that could be free."""
        return sum(file.nbytes for file in tuple(self._files))

    def keep_files_of(self, directory: str, names: Iterable[str]) -> None:
        """Move those of the named files of a directory here that nobody has open, or by another name."""
        if self._closed:
            return
        with contextlib.suppress(OSError), self._opened(directory) as fd:
            for name in names:
                self._keep(name, fd)

    def _keep(self, name: str, dir_fd: int) -> None:
        fd = os.open(name, _OPEN, dir_fd=dir_fd)
        try:
            status = os.fstat(fd)
            nbytes = status.st_blocks * 512
            is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
            if nbytes >= _LEAST_BYTES and is_plain and _is_open_here_only(fd):
                spare = _Spare(secrets.token_hex(8), nbytes)
                with self._own_directory() as own:
                    os.rename(name, spare.name, src_dir_fd=dir_fd, dst_dir_fd=own)
                self._files.append(spare)
        finally:
            os.close(fd)

    def take(self, name: str, dir_fd: int) -> int | None:
        """Give a spare file another name and return it open, with what was in it; None if there is none."""
        while self._files:
            with contextlib.suppress(IndexError, FileNotFoundError), self._opened(_NAME) as own:
                os.rename(self._files.pop().name, name, src_dir_fd=own, dst_dir_fd=dir_fd)
                return os.open(name, _OPEN, dir_fd=dir_fd)
        return None

    def drop(self, nbytes: int) -> None:
        """Remove spare files, those that were kept first, until so many bytes are free."""
        while nbytes > 0 and self._files:
            with contextlib.suppress(IndexError, FileNotFoundError), self._opened(_NAME) as own:
                spare = self._files.popleft()
                os.unlink(spare.name, dir_fd=own)
                nbytes -= spare.nbytes

    def close(self) -> None:
        """Keep no more files; those that are here go with the job's directory."""
        self._closed = True
        self._files.clear()

    @contextlib.contextmanager
    def _own_directory(self) -> Iterator[int]:
        with contextlib.suppress(FileExistsError):
            os.close(make_private_directory(_NAME, dir_fd=self._job_fd))
        with self._opened(_NAME) as fd:
            yield fd

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        fd = open_directory(name, dir_fd=self._job_fd)
        try:
            yield fd
        finally:
            os.close(fd)


def _is_open_here_only(fd: int) -> bool:
    """Whether no other descriptor, of any process, leads to a file: the kernel grants a lease for writing only then."""
    try:
        # Should somebody open it just now, the kernel tells us with this signal, which is ignored by default.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (OSError, AttributeError):  # in use; or a system or a file system without leases
        return False
    return True
