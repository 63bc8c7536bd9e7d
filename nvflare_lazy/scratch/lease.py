# SPDX-License-Identifier: Apache-2.0
"""The lease on a job's directory: a file beside it that is locked for as long as its owner lives.

The kernel drops the lock when the process ends, however it ends. The lease is there before the directory and goes
after it, so a directory is never seen without one, and a lease is never seen without its lock and its record.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import re
import secrets

from nvflare_lazy.errors import ScratchError
from nvflare_lazy.scratch.descriptors import close_private, keep_private
from nvflare_lazy.scratch.owner import OwnerRecord
from nvflare_lazy.scratch.refusals import named

JOB_DIRECTORY = re.compile(r"job-[0-9a-f]{16}")
LEASE_FILE = re.compile(r"(job-[0-9a-f]{16})\.lease")
LEASE_BEING_MADE = re.compile(r"(job-[0-9a-f]{16})\.lease\.new")
_LONGEST_RECORD = 1 << 16
_ATTEMPTS = 16
# The last one is how NFS refuses to lock a directory.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}


class Lock(enum.Enum):
    """What came of asking for a lock."""

    OURS = "nobody else held it"
    HELD = "somebody holds it"
    UNSUPPORTED = "this file system has no locks"


def try_lock(fd: int, *, alone: bool = True) -> Lock:
    """Ask for the lock of an open file or directory, without waiting for it; closing the file gives it back."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return Lock.HELD
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return Lock.UNSUPPORTED
        raise
    return Lock.OURS


def is_still(fd: int, name: str, *, dir_fd: int) -> bool:
    """Whether a name still stands for an open file."""
    try:
        there = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))


def open_lease(file_name: str, *, dir_fd: int) -> int:
    """Open the lease file of another owner."""
    # For writing, which locks on network file systems need; without waiting, should it be a pipe.
    return os.open(file_name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)


def read_record(fd: int) -> OwnerRecord | None:
    """Return the record in an open lease file, or None if it is not whole."""
    return OwnerRecord.from_json(os.pread(fd, _LONGEST_RECORD, 0))


class Lease:
    """A lease that this process holds.

    Args:
        root_fd: The scratch root, open; borrowed.
        root: Its path, for messages.
        job: What the job is called.
    """

    def __init__(self, root_fd: int, root: str, job: str) -> None:
        self._root_fd = root_fd
        record = OwnerRecord.of_this_process(job).to_json()
        for _ in range(_ATTEMPTS):
            self.name = f"job-{secrets.token_hex(8)}"
            try:
                if self._take(record):
                    return
            except OSError as error:
                raise named(error, "lease a directory in", root) from error
        raise ScratchError(f"cannot lease a directory in {root}: every new lease file is taken away at once")

    def give_back(self) -> None:
        """Remove the lease file, then drop the lock."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.name}.lease", dir_fd=self._root_fd)
        close_private(self._fd)

    def drop(self) -> None:
        """Drop the lock and leave the file, for others to find what could not be removed."""
        close_private(self._fd)

    def _take(self, record: bytes) -> bool:
        """Write, lock and only then name the lease file; False if somebody took it for an abandoned one."""
        new = f"{self.name}.lease.new"
        fd = os.open(
            new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._root_fd
        )
        try:
            os.fchmod(fd, 0o600)
            lock = try_lock(fd)
            # Whoever reclaims may have had the lock first, in which case the file is gone by now or soon.
            if lock is Lock.HELD or not is_still(fd, new, dir_fd=self._root_fd):
                os.close(fd)
                return False
            os.pwrite(fd, record, 0)
            os.rename(new, f"{self.name}.lease", src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=self._root_fd)
            os.close(fd)
            raise
        self.locked = lock is Lock.OURS
        self._fd = keep_private(fd)
        return True
