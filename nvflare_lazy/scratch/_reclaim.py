# SPDX-License-Identifier: Apache-2.0
"""Removes the scratch of processes that no longer exist; a process that was killed cannot remove its own.

Runs whenever a job opens its scratch, and from the command line. Any number of processes may do it at the same time,
while others open or release theirs.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nvflare_lazy._text import format_size, get_logger
from nvflare_lazy.scratch._lease import (
    LEASED,
    UNFINISHED_LEASE,
    Lock,
    OwnerRecord,
    OwnerStatus,
    has_name,
    open_lease,
    read_record,
    try_lock,
)
from nvflare_lazy.scratch._system import open_directory, remove_tree, to_scratch_error, tree_size
from nvflare_lazy.scratch.root import find_root, open_root

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterator

logger = get_logger(__name__)

# Without locks, an unfinished lease may be one that a process is writing at this moment.
_MAX_CREATION_SECONDS = 3600.0


@dataclass(frozen=True)
class LeaseInfo:
    """One job's scratch directory, and whether its owner is running."""

    path: Path
    job: str
    owner: str
    alive: bool | None
    """None if that cannot be determined from here: the owner is, or was, on another host."""
    nbytes: int
    age: float
    """Seconds since it was leased."""
    reason: str
    """How `alive` was determined."""

    def __str__(self) -> str:
        return f"{self.path} ({format_size(self.nbytes)}) of {self.owner}, job {self.job!r}: {self.reason}"


def list_scratch(root: str | os.PathLike[str] | None = None) -> list[LeaseInfo]:
    """List the jobs that have scratch under a root, without changing anything.

    Args:
        root: The scratch root, or the default one.
    """
    directory = find_root(root)
    if directory is None:
        return []
    leases = []
    with _open_root(directory) as root_fd:
        for name in _names(root_fd, directory, LEASED):
            with _inspect_lease(root_fd, directory, name, exclusive=False) as lease:
                if lease:
                    leases.append(replace(lease, nbytes=tree_size(name, dir_fd=root_fd)))
    return leases


def reclaim(root: str | os.PathLike[str] | None = None, *, include_other_hosts: bool = False) -> list[LeaseInfo]:
    """Remove the scratch of processes that no longer exist, and return the removed leases.

    Args:
        root: The scratch root, or the default one.
        include_other_hosts: Whether to remove also directories of other hosts, whose owners may be running: that
            cannot be determined from here. Set it only if you know that they are not.

    Example:
        >>> for lease in reclaim("/data/scratch"):
        ...     print(lease.path, lease.nbytes, lease.reason)
    """
    directory = find_root(root)
    if directory is None:
        return []
    reclaimed = []
    with _open_root(directory) as root_fd:
        for name in _names(root_fd, directory, LEASED):
            try:
                lease = _reclaim_one(root_fd, directory, name, include_other_hosts=include_other_hosts)
            except OSError as error:
                logger.warning("Cannot reclaim %s: %s", directory / name, error)
                continue
            if lease:
                logger.info("Reclaimed %s", lease)
                reclaimed.append(lease)
        _remove_unfinished_leases(root_fd, directory)
    return reclaimed


@contextlib.contextmanager
def _open_root(directory: Path) -> Iterator[int]:
    fd = open_root(directory)
    try:
        yield fd
    finally:
        os.close(fd)


def _names(root_fd: int, root: Path, pattern: re.Pattern[str]) -> list[str]:
    """Return the names of all jobs that have an entry of a pattern in the root; anything else there is not ours."""
    try:
        with os.scandir(root_fd) as entries:
            return sorted({match[1] for entry in entries if (match := pattern.fullmatch(entry.name))})
    except OSError as error:
        raise to_scratch_error(error, "list the scratch root", root) from error


def _reclaim_one(root_fd: int, root: Path, name: str, *, include_other_hosts: bool) -> LeaseInfo | None:
    with _inspect_lease(root_fd, root, name) as lease:
        if lease is None or lease.alive:
            return None
        if lease.alive is None and not include_other_hosts:
            logger.info(
                "Kept %s: %s; if it is not needed: nvflare-lazy clean --remove --include-other-hosts",
                name,
                lease.reason,
            )
            return None
        nbytes = tree_size(name, dir_fd=root_fd)
        remove_tree(name, dir_fd=root_fd)
        # Last, so that no directory is ever without a lease.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{name}.lease", dir_fd=root_fd)
    return replace(lease, nbytes=nbytes)


@contextlib.contextmanager
def _inspect_lease(root_fd: int, root: Path, name: str, *, exclusive: bool = True) -> Iterator[LeaseInfo | None]:
    """Examine a job's directory, except for its size, and hold its locks during that; None if it was just removed."""
    with contextlib.ExitStack() as held:
        lease_fd = _try_open(held, open_lease, f"{name}.lease", root_fd)
        lease_lock = try_lock(lease_fd, exclusive=exclusive) if lease_fd is not None else None
        if lease_fd is not None and not has_name(lease_fd, f"{name}.lease", dir_fd=root_fd):
            yield None
            return
        directory_fd = _try_open(held, open_directory, name, root_fd)
        directory_lock = try_lock(directory_fd, exclusive=exclusive) if directory_fd is not None else None
        # An owner holds both; the directory's lock is the one that is left if another program deleted the lease file.
        locks = {lease_lock, directory_lock}
        lock = next((one for one in (Lock.HELD, Lock.OURS, Lock.UNSUPPORTED) if one in locks), None)
        if lock is None:
            yield None
            return
        fd = lease_fd if lease_fd is not None else directory_fd
        assert fd is not None
        record = read_record(fd) if lease_fd is not None else None
        alive, reason = _liveness(record, lock)
        yield LeaseInfo(
            path=root / name,
            job=record.job if record else "",
            owner=record.describe() if record else "an unknown owner",
            alive=alive,
            nbytes=0,
            age=max(0.0, time.time() - (record.created if record else os.fstat(fd).st_mtime)),
            reason=reason,
        )


def _try_open(held: contextlib.ExitStack, open_: Callable[..., int], name: str, root_fd: int) -> int | None:
    try:
        fd = open_(name, dir_fd=root_fd)
    except OSError:
        return None
    held.callback(os.close, fd)
    return fd


def _liveness(record: OwnerRecord | None, lock: Lock) -> tuple[bool | None, str]:
    """Return whether an owner is running, and why: the lock proves most cases, the record decides the others."""
    if lock is Lock.HELD:
        return True, "its lock is held"
    if record is None:
        if lock is Lock.OURS:
            return False, "its owner record is incomplete, and no process holds its lock"
        return None, "its owner record is incomplete, and this file system has no locks"
    status = record.status()
    if status is OwnerStatus.ALIVE:
        return True, status.value
    if status is OwnerStatus.OTHER_HOST or (lock is Lock.UNSUPPORTED and status is not OwnerStatus.DEAD):
        return None, f"{status.value}, which cannot be checked from here"
    return False, f"{status.value}, and no process holds its lock"


def _remove_unfinished_leases(root_fd: int, root: Path) -> None:
    """Remove lease files of processes that ended before they finished them."""
    for job in _names(root_fd, root, UNFINISHED_LEASE):
        name = f"{job}.lease.new"
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            fd = _try_open(held, open_lease, name, root_fd)
            if fd is None:
                continue
            lock = try_lock(fd)
            old = time.time() - os.fstat(fd).st_mtime > _MAX_CREATION_SECONDS
            if (lock is Lock.OURS or (lock is Lock.UNSUPPORTED and old)) and has_name(fd, name, dir_fd=root_fd):
                os.unlink(name, dir_fd=root_fd)
