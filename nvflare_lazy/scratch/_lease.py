# SPDX-License-Identifier: Apache-2.0
"""The lease on a job's directory: a file beside it that is locked for as long as its owner lives.

The kernel drops the lock when the process ends, however it ends. The lease is there before the directory and goes
after it, so a directory is never seen without one, and a lease is never seen without its lock and its record. The
record says which process the owner is, for file systems without locks.
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
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from nvflare_lazy.errors import ScratchError
from nvflare_lazy.scratch._system import close_private, keep_private, named

JOB_DIRECTORY = re.compile(r"job-[0-9a-f]{16}")
LEASE_FILE = re.compile(r"(job-[0-9a-f]{16})\.lease")
LEASE_BEING_MADE = re.compile(r"(job-[0-9a-f]{16})\.lease\.new")
_LONGEST_RECORD = 1 << 16
_LONGEST_JOB_NAME = 200
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


class Standing(enum.Enum):
    """What a record alone says of its owner."""

    ALIVE = "its owner is running"
    DEAD = "its owner is gone"
    RESTARTED = "its host has restarted since"
    OTHER_CONTAINER = "its owner is in another container of this host"
    OTHER_HOST = "its owner is on another host"


@dataclass(frozen=True)
class OwnerRecord:
    """A process, told apart from every other one, on any host, at any time."""

    job: str
    pid: int
    started: int | None
    """When it started, in the kernel's ticks: a pid alone is used again. None where the system does not tell."""
    hostname: str
    boot_id: str
    """Names one run of one kernel; empty where the system has no such name."""
    pid_namespace: str
    """Where the pid counts: containers of one host each have a process 1."""
    created: float

    @classmethod
    def of_this_process(cls, job: str) -> OwnerRecord:
        """Return the record of the calling process."""
        return cls(
            job=job[:_LONGEST_JOB_NAME],
            pid=os.getpid(),
            started=start_of_process(os.getpid()),
            hostname=os.uname().nodename,
            boot_id=_boot_id(),
            pid_namespace=_pid_namespace(),
            created=time.time(),
        )

    @classmethod
    def from_json(cls, data: bytes) -> OwnerRecord | None:
        """Return a record that was written, or None if it is not whole."""
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
        """Return the record as it is written to a file."""
        return json.dumps(asdict(self)).encode()

    def describe(self) -> str:
        """Name the owner for a person."""
        return f"process {self.pid} on {self.hostname}"

    def standing(self) -> Standing:
        """Say what can be told of the owner from here."""
        same_host = self.hostname == os.uname().nodename
        if self.boot_id != _boot_id() or not (self.boot_id or same_host):
            return Standing.RESTARTED if same_host else Standing.OTHER_HOST
        if self.pid_namespace != _pid_namespace():
            return Standing.OTHER_CONTAINER
        return Standing.ALIVE if _is_running(self.pid, self.started) else Standing.DEAD


def start_of_process(pid: int) -> int | None:
    """Return when a process started, in ticks since the kernel did, or None if there is no telling."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def _is_running(pid: int, started: int | None) -> bool:
    fields = _stat_fields(pid)
    if fields is not None:
        # A zombie has let go of everything but its number.
        return fields[0] not in ("Z", "X") and started in (None, int(fields[19]))
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the state on; the name before it may contain anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


@functools.cache
def _boot_id() -> str:
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
