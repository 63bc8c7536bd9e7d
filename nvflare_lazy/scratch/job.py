# SPDX-License-Identifier: Apache-2.0
"""The scratch of one job in one process: a leased directory, a quota, and the downloads in it.

The transport asks it for a directory before the first byte of a download arrives; the end of the job, or of the
process, takes all of them away. `JobScratch` is the handle, and `JobDirectory` the body, which has no reference to the
handle, so that it ends with the handle.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import weakref
from typing import TYPE_CHECKING

from nvflare_lazy._text import parse_size
from nvflare_lazy.errors import ScratchDeletedError, ScratchError, ScratchReleasedError
from nvflare_lazy.scratch._lease import Lease, try_lock
from nvflare_lazy.scratch._quota import Allotment, SpaceAccount, min_free_bytes
from nvflare_lazy.scratch._reclaim import reclaim
from nvflare_lazy.scratch._recycled_files import SpareFiles
from nvflare_lazy.scratch._system import close_private, keep_private, make_private_directory, named, remove_tree
from nvflare_lazy.scratch.download import DownloadDirectory, DownloadScratch
from nvflare_lazy.scratch.file_systems import RootReport, describe_root
from nvflare_lazy.scratch.root import ScratchRoot, open_root

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

logger = logging.getLogger(__name__)


class JobScratch:
    """A leased directory for all that a job receives; `JobScratch.open` makes them.

    | member | what it is |
    |---|---|
    | `download()` | a directory for one download |
    | `used`, `peak`, `free()` | bytes held, most ever held, still possible |
    | `report`, `report.warnings` | what the root is on, and what is wrong with that |
    | `release()` | the end, also as a context manager |

    Example:
        >>> with JobScratch.open("/data/scratch", job="job-7", quota="50GiB") as job:
        ...     download = job.download("result of site-1")
    """

    def __init__(self, root: Path, job: str, account: SpaceAccount, report: RootReport) -> None:
        self.root = root
        self.job = job
        self.report = report
        self._account = account
        self._pid = os.getpid()
        self._lock = threading.RLock()
        # More than one after a directory was deleted underneath: the last is in use.
        self._directories = [self._leased()]
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
        """Reclaim what dead owners left under the root, then lease a directory in it.

        Args:
            root: Where, as for `ScratchRoot.resolve`.
            job: What the job is called, for whoever lists leases. It never becomes part of a path.
            quota: Most bytes to hold at a time, such as "50GiB".
            min_free: How much of the file system to leave free, such as "2GiB" or "5%"; without it 1 GiB, or a
                twentieth of a file system that is smaller than 20 GiB.
            warn: Whether to log what is wrong with the root, such as being in memory.
        """
        limit = None if quota is None else parse_size(quota)
        place = ScratchRoot.resolve(root)
        report = describe_root(place)
        account = SpaceAccount(place, limit, min_free_bytes(min_free, report.total))
        for warning in report.warnings if warn else ():
            logger.warning("%s", warning)
        try:
            reclaim(place)
        except ScratchError as error:
            logger.warning("cannot look for what dead processes left: %s", error)
        return cls(place, job, account, report)

    @property
    def path(self) -> Path:
        """The job's directory."""
        return self._directories[-1].path

    @property
    def used(self) -> int:
        """Bytes held now: files, and what downloads expect or have set aside."""
        return self._account.used

    @property
    def peak(self) -> int:
        """Most bytes ever held at once."""
        return self._account.peak

    @property
    def released(self) -> bool:
        """Whether it has been released, or is being."""
        return self._directories[-1].released

    def free(self) -> int:
        """Return how many bytes could be received now, as far as quota and disk go."""
        return self._account.free()

    def download(self, label: str | None = None, expect: int | None = None) -> DownloadScratch:
        """Lease a directory for one download.

        If the job's directory was deleted underneath, a new one is leased: what was in the old one is lost, but the
        process goes on.

        Args:
            label: What to call it in messages; never part of a path.
            expect: Bytes that will come, if they are known; the quota and the disk must have them.

        Raises:
            QuotaExceededError: If the job may not hold what is expected.
            DiskFullError: If the disk cannot, or should not.
            ScratchReleasedError: If the job was released.
        """
        if expect is not None and expect < 0:
            raise ValueError(f"a download of {expect} bytes")
        if os.getpid() != self._pid:
            raise ScratchError(
                f"the scratch of job {self.job!r} belongs to process {self._pid}, which forked this one; open a "
                "JobScratch in each process"
            )
        with self._lock:
            if self._directories[-1].released:
                raise ScratchReleasedError(f"the scratch of job {self.job!r} was released; open another one")
            try:
                directory = self._directories[-1].download(label)
            except ScratchDeletedError as error:
                logger.warning("%s; going on in a new one", error)
                ScratchRoot.resolve(self.root)
                self._directories.append(self._leased())
                directory = self._directories[-1].download(label)
        download = DownloadScratch(self, directory)
        if expect is not None:
            try:
                directory.allotment.expect(expect)
            except BaseException:
                download.release()
                raise
        return download

    def release(self) -> None:
        """Release all downloads, then remove the directory and its lease; when this returns, they are gone.

        May be called any number of times, from any thread.
        """
        self._finalizer.detach()
        with self._lock:
            _release(self._directories)

    def _leased(self) -> JobDirectory:
        return JobDirectory(
            self.root,
            self.job,
            self._account,
            preallocates=self.report.preallocates,
            reuses=not self.report.memory_backed,
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
    """A directory that is this process's until it is released or the process ends.

    Args:
        root: The scratch root.
        job: What the job is called.
        account: What its downloads may hold.
        preallocates: Whether setting disk space aside is cheap there.
        reuses: Whether files of downloads that are over are kept to be written over.
    """

    def __init__(self, root: Path, job: str, account: SpaceAccount, *, preallocates: bool, reuses: bool) -> None:
        self.released = False
        self._account = account
        self._preallocates = preallocates
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._downloads: dict[str, DownloadDirectory] = {}
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
                "%s is on a file system without locks: what a killed process leaves there is reclaimed only by the "
                "same host and container; a directory on a local disk is better",
                root,
            )
        self.path = root / self._lease.name
        try:
            self._fd = keep_private(make_private_directory(self._lease.name, dir_fd=self._root_fd))
            # A second proof of life, should somebody delete the lease file. It also tells systemd-tmpfiles, which
            # deletes what is old, to keep away.
            try_lock(self._fd)
            self._spares = SpareFiles(self._fd) if reuses else None
            account.spares = self._spares
        except BaseException as error:
            self._lease.give_back()
            close_private(self._root_fd)
            if isinstance(error, OSError):
                raise named(error, "make a directory for a job in", root) from error
            raise

    def download(self, label: str | None) -> DownloadDirectory:
        """Make a directory for one download."""
        name = secrets.token_hex(8)
        with self._lock:
            if self.released:
                raise ScratchReleasedError(f"{self.path} was released")
            directory = DownloadDirectory(
                self._fd,
                self.path,
                name,
                label=label,
                allotment=Allotment(self._account),
                preallocates=self._preallocates,
                spares=self._spares,
                gone=lambda gone: self._downloads.pop(gone, None),
            )
            self._downloads[name] = directory
        return directory

    def release(self, *, wait: bool = True) -> None:
        """Release all downloads, remove the directory, then give the lease back.

        Args:
            wait: Whether to wait for another thread that is doing so already.
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
        if self._spares is not None:
            self._spares.close()
        try:
            for directory in list(self._downloads.values()):
                directory.release()
            remove_tree(self._lease.name, dir_fd=self._root_fd)
        except OSError as error:
            logger.warning("cannot remove %s: %s; a later start will", self.path, error)
            self._lease.drop()
        else:
            self._lease.give_back()
        finally:
            with contextlib.suppress(OSError):
                close_private(self._fd)
                close_private(self._root_fd)
            self._removed.set()
