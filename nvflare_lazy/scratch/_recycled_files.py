# SPDX-License-Identifier: Apache-2.0
"""Files of finished downloads, kept so that later downloads overwrite them.

A round receives the same number of bytes as the previous round. Writing to pages that are already in the page cache is
several times as fast as allocating new ones, and a receiver mostly writes.
"""

from __future__ import annotations

import contextlib
import enum
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
# Enough for the files of several rounds; each one is looked at when a file is taken.
_MAX_FILES = 64
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class _RecycledFile(NamedTuple):
    name: str
    nbytes: int


class RecycledFiles:
    """The recycled files of one job's directory, whose descriptor is borrowed.

    A file that has another name is *lent*: it may be used again when the other process has removed its name. A file
    that is open in any process is not used again. Both are examined after the file has got its name here, which no
    reader looks up, and again when the file is taken.

    A finalizer may run any method in the middle of any other: the methods use a deque instead of locks. A file that
    cannot be recycled is removed with its directory.
    """

    def __init__(self, job_fd: int) -> None:
        self._job_fd = job_fd
        #: The oldest first.
        self.files: deque[_RecycledFile] = deque()
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes on the disk that removing them would free: those of files without another name."""
        if not self.files:
            return 0
        with self._opened() as own:
            return sum(file.nbytes for file in tuple(self.files) if _has_one_name(file.name, own))

    def recycle(self, directory: str, names: Iterable[str]) -> None:
        """Keep these files of a directory."""
        if self._closed:
            return
        with contextlib.suppress(OSError), opened_directory(directory, dir_fd=self._job_fd) as fd:
            for name in names:
                self._keep(name, fd)

    def _keep(self, name: str, dir_fd: int) -> None:
        status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        nbytes = status.st_blocks * 512
        if nbytes < _MIN_BYTES or not stat.S_ISREG(status.st_mode):
            return
        file = _RecycledFile(secrets.token_hex(8), nbytes)
        with contextlib.suppress(FileExistsError):
            os.close(make_private_directory(_NAME, dir_fd=self._job_fd))
        with self._opened() as own:
            os.rename(name, file.name, src_dir_fd=dir_fd, dst_dir_fd=own)
            try:
                use = _use(file.name, own)
            except OSError:  # such as too many open files
                use = _Use.READ
            if use is _Use.READ:
                os.unlink(file.name, dir_fd=own)
                return
        self.files.append(file)
        if len(self.files) > _MAX_FILES:
            self._remove_oldest()

    def take(self, name: str, dir_fd: int) -> int | None:
        """Rename a file without readers, and return it open, with its old bytes, or None if all have readers."""
        lent: list[_RecycledFile] = []
        try:
            with self._opened() as own:
                while self.files:
                    known = len(lent)
                    try:
                        lent.append(self.files.pop())
                        use = _use(lent[-1].name, own)
                        if use is _Use.LENT:
                            continue
                        file = lent.pop()
                        if use is _Use.READ:
                            os.unlink(file.name, dir_fd=own)
                        else:
                            os.rename(file.name, name, src_dir_fd=own, dst_dir_fd=dir_fd)
                            return os.open(name, _WRITE, dir_fd=dir_fd)
                    except IndexError:  # another thread has taken it
                        break
                    except FileNotFoundError:  # another program has deleted it
                        del lent[known:]
        except FileNotFoundError:  # the directory
            self.files.clear()
        finally:
            self.files.extend(reversed(lent))
        return None

    def remove(self, nbytes: int) -> None:
        """Remove files, the oldest first, until `nbytes` are freed. Removing a lent file frees nothing yet."""
        while nbytes > 0 and self.files:
            nbytes -= self._remove_oldest()

    def _remove_oldest(self) -> int:
        """Remove a file and return the number of bytes that this frees."""
        with contextlib.suppress(IndexError, FileNotFoundError), self._opened() as own:
            file = self.files.popleft()
            nbytes = file.nbytes if _has_one_name(file.name, own) else 0
            os.unlink(file.name, dir_fd=own)
            return nbytes
        return 0

    def close(self) -> None:
        """Keep no more files; the present ones are removed with the job's directory."""
        self._closed = True
        self.files.clear()

    def _opened(self) -> AbstractContextManager[int]:
        return opened_directory(_NAME, dir_fd=self._job_fd)


def _has_one_name(name: str, dir_fd: int) -> bool:
    """Whether a file exists and has no other name."""
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_nlink == 1
    except FileNotFoundError:
        return False


class _Use(enum.Enum):
    NONE = "no process has it open, and it has no other name"
    LENT = "it has another name"
    READ = "a process has it open, or the file system cannot tell"


def _use(name: str, dir_fd: int) -> _Use:
    """Return how a file is in use, and make an unused one writable: one that was shared may be read-only."""
    fd = os.open(name, _READ, dir_fd=dir_fd)
    try:
        if os.fstat(fd).st_nlink != 1:
            return _Use.LENT
        if not _is_open_only_here(fd):
            return _Use.READ
        os.fchmod(fd, 0o600)
        return _Use.NONE
    finally:
        os.close(fd)


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
