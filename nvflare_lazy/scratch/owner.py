# SPDX-License-Identifier: Apache-2.0
"""Who owns a scratch directory: what the lease file says of a process, so that another can tell whether it lives."""

from __future__ import annotations

import enum
import functools
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_LONGEST_JOB_NAME = 200


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
