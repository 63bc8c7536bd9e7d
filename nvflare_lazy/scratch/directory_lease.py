# SPDX-License-Identifier: Apache-2.0
"""`DirectoryLease`: the lease of one job on a directory that outlives it, such as the directory of its checkpoints.

It has the lock and the owner record of a scratch lease, in a file with a fixed name. The persistor holds it during a
run, so that no second job writes to the same directory.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import JobCheckpointError
from nvflare_lazy.scratch._lease import Lock, OwnerRecord, OwnerStatus, has_name, open_lease, read_record, try_lock
from nvflare_lazy.scratch._system import close_private, keep_private

if TYPE_CHECKING:
    from collections.abc import Iterator

LEASE_NAME = ".lease"
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_MAX_ATTEMPTS = 16


class DirectoryLease:
    """A lease that this process holds, until `release()` or until the last reference to it is gone.

    A lease whose process no longer exists is replaced. The kernel's lock proves that, for other hosts as well if the
    file system has locks across hosts. Without locks the owner record decides, and a record of another host cannot be
    checked.

    Args:
        directory: The directory.
        job: The id of the job, for the error that another job gets.

    Raises:
        JobCheckpointError: Another job has the lease, or may have it.

    Example:
        >>> lease = DirectoryLease(Path("/data/checkpoints"), job="job-7")
        >>> lease.release()
    """

    def __init__(self, directory: Path, job: str) -> None:
        self._path = directory / LEASE_NAME
        with _opened(directory) as directory_fd:
            for _ in range(_MAX_ATTEMPTS):
                fd = self._take(directory_fd)
                if fd is not None:
                    break
            else:
                raise JobCheckpointError(f"cannot lock {directory}: other processes keep removing {self._path}")
            try:
                os.ftruncate(fd, 0)
                os.pwrite(fd, OwnerRecord.for_this_process(job).to_json(), 0)
            except BaseException:
                os.unlink(LEASE_NAME, dir_fd=directory_fd)
                os.close(fd)
                raise
        self._finalizer = weakref.finalize(self, _release, keep_private(fd), directory, os.getpid())

    def release(self) -> None:
        """Remove the lease; a second call does nothing."""
        self._finalizer()

    def _take(self, directory_fd: int) -> int | None:
        """Return the lease file, locked; None if it was removed at this moment, by its owner or as an abandoned one."""
        try:
            fd = os.open(LEASE_NAME, _NEW_FILE, 0o600, dir_fd=directory_fd)
            is_new = True
        except FileExistsError:
            try:
                fd = open_lease(LEASE_NAME, dir_fd=directory_fd)
            except FileNotFoundError:
                return None
            is_new = False
        try:
            lock = try_lock(fd)
            record = read_record(fd)
            if lock is Lock.HELD:
                raise self._in_use(record)
            if has_name(fd, LEASE_NAME, dir_fd=directory_fd):
                if lock is Lock.OURS or is_new:
                    return fd
                self._check_ended(record)
                os.unlink(LEASE_NAME, dir_fd=directory_fd)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _check_ended(self, record: OwnerRecord | None) -> None:
        """Raise unless the owner is known to have ended, on a file system without locks."""
        status = record.status() if record else None
        if status in (OwnerStatus.DEAD, OwnerStatus.RESTARTED):
            return
        if status is OwnerStatus.ALIVE:
            raise self._in_use(record)
        raise JobCheckpointError(
            f"{self._path.parent} may be in use by {_describe(record)}: its file system has no locks, so that cannot "
            f"be checked from here. If that job has ended: rm {shlex.quote(str(self._path))}"
        )

    def _in_use(self, record: OwnerRecord | None) -> JobCheckpointError:
        return JobCheckpointError(
            f"{self._path.parent} is in use by {_describe(record)}; wait until it ends, stop it, or choose another "
            "checkpoint_dir"
        )


def _describe(record: OwnerRecord | None) -> str:
    return f"job {quoted(record.job)}, {record.describe()}" if record else "a job without a complete record"


def _release(fd: int, directory: Path, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked process, which does not own the lease, and has closed its copy of the descriptor
    with contextlib.suppress(OSError), _opened(directory) as directory_fd:
        # If it was removed by hand, another job may have created a new one.
        if has_name(fd, LEASE_NAME, dir_fd=directory_fd):
            os.unlink(LEASE_NAME, dir_fd=directory_fd)
    close_private(fd)


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
