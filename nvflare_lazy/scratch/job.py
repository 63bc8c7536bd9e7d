# SPDX-License-Identifier: Apache-2.0
"""The scratch of one job in one process: a leased directory, a quota, and the downloads in it.

The transport leases a directory in it before the first byte of a download arrives. The end of the job, or of the
process, removes all of them. `JobScratch` is the handle. `JobDirectory` is the body, which does not refer to the
handle, so that it ends with it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import weakref
from typing import TYPE_CHECKING

from nvflare_lazy._text import get_logger, parse_size
from nvflare_lazy.errors import ScratchDeletedError, ScratchError, ScratchReleasedError
from nvflare_lazy.scratch._cleanup_process import cleanup_process
from nvflare_lazy.scratch._lease import Lease, try_lock
from nvflare_lazy.scratch._quota import Quota, QuotaReservation, min_free_bytes
from nvflare_lazy.scratch._reclaim import reclaim
from nvflare_lazy.scratch._recycled_files import RecycledFiles
from nvflare_lazy.scratch._system import (
    close_private,
    keep_private,
    make_private_directory,
    remove_tree,
    to_scratch_error,
)
from nvflare_lazy.scratch.download import DownloadDirectory, DownloadScratch
from nvflare_lazy.scratch.file_systems import RootInfo, inspect_root
from nvflare_lazy.scratch.rendezvous import Rendezvous, VisitedRendezvous, visit
from nvflare_lazy.scratch.root import open_root, resolve_root

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

logger = get_logger(__name__)


class JobScratch:
    """A leased directory for everything that a job receives; `JobScratch.open` creates them.

    Example:
        >>> with JobScratch.open("/data/scratch", job="job-7", quota="50GiB") as job:
        ...     download = job.download("result of site-1")
    """

    def __init__(self, root: Path, job: str, quota: Quota, root_info: RootInfo) -> None:
        self.root = root
        self.job = job
        self.root_info = root_info
        self._quota = quota
        self._pid = os.getpid()
        self._lock = threading.RLock()
        # More than one if another program deleted a directory: the last is in use.
        self._directories = [self._lease_directory()]
        self._finalizer = weakref.finalize(self, _release, self._directories, wait=False)

    @classmethod
    def open(
        cls,
        root: str | os.PathLike[str] | None = None,
        *,
        job: str,
        quota: int | str | None = None,
        min_free: int | str | None = None,
        warn: bool = True,
    ) -> JobScratch:
        """Reclaim the directories of processes that no longer exist, then lease a directory under the root.

        Args:
            root: The scratch root. Default: `NVFLARE_LAZY_SCRATCH`, else in the cache directory of the user.
            job: The job's name, for lists of leases. It never becomes part of a path.
            quota: Most bytes to hold at a time, such as "50GiB".
            min_free: How much of the file system to leave free, such as "2GiB" or "5%". Default: 1 GiB, or a
                twentieth of a file system that is smaller than 20 GiB.
            warn: Whether to log problems of the root, for example that it is in memory.
        """
        limit = None if quota is None else parse_size(quota)
        directory = resolve_root(root)
        info = inspect_root(directory)
        for warning in info.warnings if warn else ():
            logger.warning("%s", warning)
        try:
            reclaim(directory)
        except ScratchError as error:
            logger.warning("Cannot reclaim scratch of processes that no longer exist: %s", error)
        return cls(directory, job, Quota(directory, limit, min_free_bytes(min_free, info.total)), info)

    @property
    def path(self) -> Path:
        """The job's directory."""
        return self._directories[-1].path

    @property
    def used(self) -> int:
        """Bytes held now: written and reserved."""
        return self._quota.used

    @property
    def peak(self) -> int:
        """Most bytes ever held at once."""
        return self._quota.peak

    def take_peak(self) -> int:
        """Return the most bytes held at once since the last call."""
        return self._quota.take_peak()

    @property
    def released(self) -> bool:
        """Whether it has been released, or is being released."""
        return self._directories[-1].released

    def free(self) -> int:
        """Return how many bytes the quota and the disk still accept."""
        return self._quota.free()

    def download(self, label: str | None = None, reserve: int = 0) -> DownloadScratch:
        """Lease a directory for one download.

        If another program deleted the job's directory, a new one is leased: the files of the old one are lost, but the
        process continues.

        Args:
            label: Its name in messages; never part of a path.
            reserve: Bytes that will be written, if they are known; the quota and the disk must have them.

        Raises:
            QuotaExceededError: If the job may not hold that much.
            DiskFullError: If the disk cannot, or should not.
            ScratchReleasedError: If the job was released.
        """
        if reserve < 0:
            raise ValueError(f"reserve must be >= 0, got {reserve}")
        if os.getpid() != self._pid:
            raise ScratchError(
                f"the scratch of job {self.job!r} belongs to process {self._pid}, which forked this one; open a "
                "JobScratch in each process"
            )
        with self._lock:
            try:
                directory = self._directories[-1].download(label)
            except ScratchDeletedError as error:
                logger.warning("%s; continuing in a new directory", error)
                resolve_root(self.root)
                self._directories.append(self._lease_directory())
                directory = self._directories[-1].download(label)
        download = DownloadScratch(self, directory)
        if reserve:
            try:
                directory.reservation.reserve(reserve)
            except BaseException:
                download.release()
                raise
        return download

    def rendezvous(self) -> Rendezvous:
        """Return the directory through which this job gives files to processes on this host; created on first use.

        Raises:
            ScratchReleasedError: If the job was released.
        """
        return self._directories[-1].rendezvous()

    def visit(self, lease: object) -> VisitedRendezvous | None:
        """Open the shared files of another leased directory under the same root; None for any other name."""
        if any(lease == directory.path.name for directory in self._directories):
            return None
        return visit(self.root, lease)

    def release(self) -> None:
        """Release all downloads, then remove the directory and its lease; when this returns, they are gone.

        Repeated calls are allowed, from any thread.
        """
        self._finalizer.detach()
        with self._lock:
            _release(self._directories)

    def _lease_directory(self) -> JobDirectory:
        return JobDirectory(
            self.root,
            self.job,
            self._quota,
            preallocates=self.root_info.preallocates,
            recycles=not self.root_info.memory_backed,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<JobScratch {self.job!r} at {self.path}{', released' if self.released else ''}>"


def _release(directories: list[JobDirectory], *, wait: bool = True) -> None:
    for directory in directories:
        directory.release(wait=wait)


class JobDirectory:
    """A directory that belongs to this process until it is released or the process ends.

    With `recycles`, files of finished downloads are kept, for the next ones to write over.
    """

    def __init__(self, root: Path, job: str, quota: Quota, *, preallocates: bool, recycles: bool) -> None:
        self.released = False
        self._job = job
        self._quota = quota
        self._preallocates = preallocates
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._downloads: dict[str, DownloadDirectory] = {}
        self._rendezvous: Rendezvous | None = None
        self._releaser = 0
        self._removed = threading.Event()
        self._root_fd = keep_private(open_root(root))
        try:
            self._lease = Lease(self._root_fd, os.fspath(root), job)
        except BaseException:
            close_private(self._root_fd)
            raise
        if not self._lease.locked:
            logger.warning(
                "%s is on a file system without locks, where scratch of a killed process is only reclaimed by the same "
                "host and container; use a directory on a local disk",
                root,
            )
        self.path = root / self._lease.name
        cleanup_process.add(os.fspath(self.path))
        try:
            self._fd = keep_private(make_private_directory(self._lease.name, dir_fd=self._root_fd))
            # A second proof that the owner runs, in case another program deletes the lease file. It also keeps
            # systemd-tmpfiles, which deletes old files, away.
            try_lock(self._fd)
            self._recycled_files = RecycledFiles(self._fd) if recycles else None
            quota.recycled_files = self._recycled_files
        except BaseException as error:
            self._release_lease()
            close_private(self._root_fd)
            if isinstance(error, OSError):
                raise to_scratch_error(error, "make a directory for a job in", root) from error
            raise

    def download(self, label: str | None) -> DownloadDirectory:
        """Create a directory for one download."""
        name = secrets.token_hex(8)
        with self._lock:
            if self.released:
                raise ScratchReleasedError(f"the scratch of job {self._job!r} was released; open another one")
            directory = DownloadDirectory(
                self._fd,
                self.path,
                name,
                label=label,
                reservation=QuotaReservation(self._quota),
                preallocates=self._preallocates,
                recycled_files=self._recycled_files,
                on_removed=lambda name: self._downloads.pop(name, None),
            )
            self._downloads[name] = directory
        return directory

    def rendezvous(self) -> Rendezvous:
        """Return the directory of shared files."""
        with self._lock:
            if self.released:
                raise ScratchReleasedError(f"the scratch of job {self._job!r} was released; open another one")
            if self._rendezvous is None:
                self._rendezvous = Rendezvous(self._fd, self._lease.name)
            return self._rendezvous

    def release(self, *, wait: bool = True) -> None:
        """Release all downloads, remove the directory, then release the lease.

        Without `wait`, it does not wait for another thread that is already releasing it.
        """
        if os.getpid() != self._pid:
            return
        me = threading.get_ident()
        with self._lock:
            first = not self.released
            if first:
                self.released = True
                self._releaser = me
        if first:
            self._remove()
        elif wait and self._releaser != me:
            self._removed.wait()

    def _remove(self) -> None:
        if self._recycled_files is not None:
            self._recycled_files.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
        try:
            for directory in list(self._downloads.values()):
                directory.release()
            remove_tree(self._lease.name, dir_fd=self._root_fd)
        except OSError as error:
            logger.warning("Cannot remove %s: %s; a later start will remove it", self.path, error)
            self._lease.abandon()
        else:
            self._release_lease()
        finally:
            with contextlib.suppress(OSError):
                close_private(self._fd)
                close_private(self._root_fd)
            self._removed.set()

    def _release_lease(self) -> None:
        self._lease.release()
        cleanup_process.discard(os.fspath(self.path))
