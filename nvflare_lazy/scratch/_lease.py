# SPDX-License-Identifier: Apache-2.0
"""The lease on a job's directory: a file in the same directory that is locked while its owner runs.

The kernel drops the lock when the process ends, however it ends. The lease is created before the directory and removed
after it, so that no process sees a directory without a lease, or a lease without its lock and its record. The record
names the owner, for file systems without locks.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import functools
import json
import os
import re
import secrets
import stat
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from nvflare_lazy.errors import ScratchError
from nvflare_lazy.scratch._system import close_private, keep_private, to_scratch_error

#: A job's directory or its lease file.
LEASED = re.compile(r"(job-[0-9a-f]{16})(\.lease)?")
UNFINISHED_LEASE = re.compile(r"(job-[0-9a-f]{16})\.lease\.new")
_MAX_RECORD_LEN = 1 << 16
_MAX_JOB_NAME_LEN = 200
_MAX_ATTEMPTS = 16
# The last one is how NFS refuses to lock a directory.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}


class Lock(enum.Enum):
    """The result of a request for a lock."""

    OURS = "this process holds it now"
    HELD = "another process holds it"
    UNSUPPORTED = "this file system has no locks"


def try_lock(fd: int, *, exclusive: bool = True) -> Lock:
    """Request the lock of an open file or directory, without waiting for it; closing the file releases it."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return Lock.HELD
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return Lock.UNSUPPORTED
        raise
    return Lock.OURS


def has_name(fd: int, name: str, *, dir_fd: int) -> bool:
    """Whether an open file still has a name."""
    try:
        there = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))


def open_lease(file_name: str, *, dir_fd: int) -> int:
    """Open the lease file of another owner; raise OSError if it is not a regular file."""
    # For writing, which locks on network file systems need; not blocking, in case it is a pipe.
    fd = os.open(file_name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file", file_name)


def read_record(fd: int) -> OwnerRecord | None:
    """Return the record in an open lease file, or None if it is incomplete."""
    return OwnerRecord.from_json(os.pread(fd, _MAX_RECORD_LEN, 0))


class Lease:
    """A lease that this process holds. The descriptor of the scratch root is borrowed."""

    def __init__(self, root_fd: int, root: str, job: str) -> None:
        self._root_fd = root_fd
        record = OwnerRecord.for_this_process(job).to_json()
        for _ in range(_MAX_ATTEMPTS):
            self.name = f"job-{secrets.token_hex(8)}"
            try:
                if self._take(record):
                    return
            except OSError as error:
                raise to_scratch_error(error, "lease a directory in", root) from error
        raise ScratchError(
            f"cannot lease a directory in {root}: each new lease file was deleted immediately; is a cleanup tool "
            "running there?"
        )

    def release(self) -> None:
        """Remove the lease file, then drop the lock."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.name}.lease", dir_fd=self._root_fd)
        close_private(self._fd)

    def abandon(self) -> None:
        """Drop the lock and leave the file, so that others find the directory, which could not be removed."""
        close_private(self._fd)

    def _take(self, record: bytes) -> bool:
        """Write, lock and only then name the lease file; False if another process reclaimed it as an abandoned one."""
        new = f"{self.name}.lease.new"
        fd = os.open(
            new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._root_fd
        )
        try:
            os.fchmod(fd, 0o600)
            lock = try_lock(fd)
            # A process that reclaims may have locked it first; then the file is removed by now, or soon.
            if lock is Lock.HELD or not has_name(fd, new, dir_fd=self._root_fd):
                os.close(fd)
                return False
            os.pwrite(fd, record, 0)
            try:
                os.rename(new, f"{self.name}.lease", src_dir_fd=self._root_fd, dst_dir_fd=self._root_fd)
            except FileNotFoundError:  # without locks, a process whose clock differs took it for an abandoned one
                os.close(fd)
                return False
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=self._root_fd)
            os.close(fd)
            raise
        self.locked = lock is Lock.OURS
        self._fd = keep_private(fd)
        return True


class OwnerStatus(enum.Enum):
    """The status of an owner, as far as the record alone tells."""

    ALIVE = "its owner is running"
    DEAD = "its owner is gone"
    RESTARTED = "its host has restarted since"
    OTHER_CONTAINER = "its owner is in another container of this host"
    OTHER_HOST = "its owner is on another host"


@dataclass(frozen=True)
class OwnerRecord:
    """Identifies a process among all processes of all hosts at all times."""

    job: str
    pid: int
    started: int | None
    """When it started, in the kernel's ticks, because pids are reused. None where the system does not report it."""
    hostname: str
    boot_id: str
    """Names one run of one kernel; empty where the system has no such name."""
    pid_namespace: str
    """Where the pid counts: containers of one host each have a process 1."""
    created: float

    @classmethod
    def for_this_process(cls, job: str) -> OwnerRecord:
        """Return the record of the calling process."""
        return cls(
            job=job[:_MAX_JOB_NAME_LEN],
            pid=os.getpid(),
            started=process_start_time(os.getpid()),
            hostname=os.uname().nodename,
            boot_id=boot_id(),
            pid_namespace=_pid_namespace(),
            created=time.time(),
        )

    @classmethod
    def from_json(cls, data: bytes) -> OwnerRecord | None:
        """Return a record that was written, or None if it is incomplete."""
        try:
            fields = json.loads(data)
            record = cls(**fields)
        except (ValueError, TypeError, RecursionError):
            return None
        texts = (record.job, record.hostname, record.boot_id, record.pid_namespace)
        whole = (
            all(isinstance(text, str) for text in texts)
            and type(record.pid) is int
            and record.pid > 0
            and (record.started is None or type(record.started) is int)
            and isinstance(record.created, float)
        )
        return record if whole else None

    def to_json(self) -> bytes:
        """Return the content of the lease file."""
        return json.dumps(asdict(self)).encode()

    def describe(self) -> str:
        """Return the owner for messages."""
        return f"process {self.pid} on {self.hostname}"

    def status(self) -> OwnerStatus:
        """Return the status of the owner as seen from this process."""
        same_host = self.hostname == os.uname().nodename
        if self.boot_id != boot_id() or not (self.boot_id or same_host):
            return OwnerStatus.RESTARTED if same_host else OwnerStatus.OTHER_HOST
        if self.pid_namespace != _pid_namespace():
            return OwnerStatus.OTHER_CONTAINER
        return OwnerStatus.ALIVE if _is_running(self.pid, self.started) else OwnerStatus.DEAD


def process_start_time(pid: int) -> int | None:
    """Return when a process started, in ticks since the kernel did, or None if the system does not report it."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def _is_running(pid: int, started: int | None) -> bool:
    fields = _stat_fields(pid)
    if fields is not None:
        # A zombie has released everything but its pid.
        return fields[0] not in ("Z", "X") and started in (None, int(fields[19]))
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat, starting at the state; the name before it may contain anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


@functools.cache
def boot_id() -> str:
    """Return the name of this run of the kernel, or an empty one if the kernel does not have one."""
    if sys.platform == "linux":
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return ""
    return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
