# SPDX-License-Identifier: Apache-2.0
"""Give back what dead owners left: a process that was killed cannot do it itself.

Runs whenever a job opens its scratch, and from the command line. Any number of processes may do it at once, beside
others that are just opening or releasing theirs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nvflare_lazy._text import format_size
from nvflare_lazy.scratch._lease import (
    JOB_DIRECTORY,
    LEASE_BEING_MADE,
    LEASE_FILE,
    Lock,
    OwnerRecord,
    Standing,
    is_still,
    open_lease,
    read_record,
    try_lock,
)
from nvflare_lazy.scratch._system import open_directory, remove_tree, tree_size
from nvflare_lazy.scratch.root import ScratchRoot, open_root

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

# Where there are no locks, an unfinished lease may be one that is being written this instant.
_MAKING_TAKES_AT_MOST = 3600.0


@dataclass(frozen=True)
class LeaseReport:
    """One job's scratch directory, and whether its owner lives."""

    path: Path
    job: str
    owner: str
    alive: bool | None
    """None if nothing here can prove it: the owner is, or was, on another host."""
    nbytes: int
    age: float
    """Seconds since it was leased."""
    reason: str
    """What says that the owner lives or does not."""


@dataclass(frozen=True)
class Reclaimed:
    """One directory that was given back."""

    path: Path
    job: str
    owner: str
    nbytes: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({format_size(self.nbytes)}) of {self.owner}, job {self.job!r}: {self.reason}"


def list_scratch(root: str | os.PathLike[str] | None = None) -> list[LeaseReport]:
    """List the jobs that have scratch under a root; nothing is changed.

    Args:
        root: The scratch root, as for `ScratchRoot.resolve`.
    """
    place = ScratchRoot.find(root)
    if place is None:
        return []
    with _opened_root(place) as root_fd:
        reports = []
        for name in _jobs(root_fd):
            with _examined(root_fd, name, alone=False) as found:
                if found:
                    reports.append(
                        LeaseReport(
                            path=place / name,
                            job=found.job,
                            owner=found.owner,
                            alive=found.alive,
                            nbytes=tree_size(name, dir_fd=root_fd),
                            age=found.age,
                            reason=found.reason,
                        )
                    )
    return reports


def reclaim(root: str | os.PathLike[str] | None = None, *, other_hosts: bool = False) -> list[Reclaimed]:
    """Remove what dead owners left under a root; a living owner's scratch is never touched.

    Args:
        root: The scratch root, as for `ScratchRoot.resolve`.
        other_hosts: Whether to remove also what belongs to other hosts, of which nothing here can tell whether they
            still run. Only safe when somebody who knows says so.

    Example:
        >>> for gone in reclaim("/data/scratch"):
        ...     print(gone.path, gone.nbytes, gone.reason)
    """
    place = ScratchRoot.find(root)
    if place is None:
        return []
    reclaimed = []
    with _opened_root(place) as root_fd:
        for name in _jobs(root_fd):
            try:
                one = _reclaim_one(root_fd, place, name, other_hosts=other_hosts)
            except OSError as error:
                logger.warning("cannot reclaim %s: %s", place / name, error)
                continue
            if one:
                logger.info("reclaimed %s", one)
                reclaimed.append(one)
        _sweep_unmade(root_fd)
    return reclaimed


@dataclass(frozen=True)
class _Found:
    """What was found out about one job's directory while its locks, where there are any, were held."""

    alive: bool | None
    reason: str
    job: str
    owner: str
    age: float


@contextlib.contextmanager
def _opened_root(place: Path) -> Iterator[int]:
    fd = open_root(place)
    try:
        yield fd
    finally:
        os.close(fd)


def _jobs(root_fd: int) -> list[str]:
    """Return the names of all jobs that have a lease or a directory; whatever else is there is not ours."""
    names = os.listdir(root_fd)
    leased = {match[1] for name in names if (match := LEASE_FILE.fullmatch(name))}
    return sorted(leased.union(name for name in names if JOB_DIRECTORY.fullmatch(name)))


def _reclaim_one(root_fd: int, place: Path, name: str, *, other_hosts: bool) -> Reclaimed | None:
    with _examined(root_fd, name) as found:
        if found is None or found.alive:
            return None
        if found.alive is None and not other_hosts:
            logger.info(
                "%s stays, for %s; if it is not needed: nvflare-lazy clean --remove --include-other-hosts",
                name,
                found.reason,
            )
            return None
        nbytes = tree_size(name, dir_fd=root_fd)
        remove_tree(name, dir_fd=root_fd)
        # Last, so that no directory is ever without a lease.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{name}.lease", dir_fd=root_fd)
    return Reclaimed(path=place / name, job=found.job, owner=found.owner, nbytes=nbytes, reason=found.reason)


@contextlib.contextmanager
def _examined(root_fd: int, name: str, *, alone: bool = True) -> Iterator[_Found | None]:
    """Find out about a job's directory, and hold its locks meanwhile; None if it has just gone."""
    with contextlib.ExitStack() as held:
        lease_fd = _opened(held, open_lease, f"{name}.lease", root_fd)
        lease_lock = try_lock(lease_fd, alone=alone) if lease_fd is not None else None
        if lease_fd is not None and not is_still(lease_fd, f"{name}.lease", dir_fd=root_fd):
            yield None
            return
        directory_fd = _opened(held, open_directory, name, root_fd)
        directory_lock = try_lock(directory_fd, alone=alone) if directory_fd is not None else None
        # An owner holds both; the directory's lock is the one that is left when somebody deleted the lease file.
        locks = {lease_lock, directory_lock}
        lock = next((one for one in (Lock.HELD, Lock.OURS, Lock.UNSUPPORTED) if one in locks), None)
        if lock is None:
            yield None
            return
        fd = lease_fd if lease_fd is not None else directory_fd
        assert fd is not None
        record = read_record(fd) if lease_fd is not None else None
        age = max(0.0, time.time() - (record.created if record else os.fstat(fd).st_mtime))
        alive, reason = _judge(record, lock)
        yield _Found(
            alive=alive,
            reason=reason,
            job=record.job if record else "",
            owner=record.describe() if record else "an unknown owner",
            age=age,
        )


def _opened(held: contextlib.ExitStack, open_: Callable[..., int], name: str, root_fd: int) -> int | None:
    try:
        fd = open_(name, dir_fd=root_fd)
    except OSError:
        return None
    held.callback(os.close, fd)
    return fd


def _judge(record: OwnerRecord | None, lock: Lock) -> tuple[bool | None, str]:
    """Say whether an owner lives, and why: the lock proves most, the record decides what it leaves open."""
    if lock is Lock.HELD:
        return True, "its lock is held"
    if record is None:
        if lock is Lock.OURS:
            return False, "it has no whole owner record, and nobody holds its lock"
        return None, "it has no whole owner record, and this file system has no locks"
    standing = record.standing()
    if standing is Standing.ALIVE:
        return True, standing.value
    if standing is Standing.OTHER_HOST or (lock is Lock.UNSUPPORTED and standing is not Standing.DEAD):
        return None, f"{standing.value}, of which nothing can be told from here"
    return False, f"{standing.value}, and nobody holds its lock"


def _sweep_unmade(root_fd: int) -> None:
    """Remove leases whose makers died before they had them."""
    for name in os.listdir(root_fd):
        if not LEASE_BEING_MADE.fullmatch(name):
            continue
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            fd = _opened(held, open_lease, name, root_fd)
            if fd is None:
                continue
            lock = try_lock(fd)
            old = time.time() - os.fstat(fd).st_mtime > _MAKING_TAKES_AT_MOST
            if (lock is Lock.OURS or (lock is Lock.UNSUPPORTED and old)) and is_still(fd, name, dir_fd=root_fd):
                os.unlink(name, dir_fd=root_fd)
