# SPDX-License-Identifier: Apache-2.0
"""The scratch of one job in one process: a leased directory, a quota, and the downloads in it.

The transport asks it for a directory before the first byte of a download arrives; the end of the job, or of the
process, takes all of them away.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING

from nvflare_lazy._text import parse_size
from nvflare_lazy.errors import ScratchDeletedError, ScratchError, ScratchReleasedError
from nvflare_lazy.scratch.account import SpaceAccount, min_free_bytes
from nvflare_lazy.scratch.download import DownloadScratch
from nvflare_lazy.scratch.file_systems import RootReport, describe_root
from nvflare_lazy.scratch.job_directory import JobDirectory
from nvflare_lazy.scratch.leftovers import reclaim
from nvflare_lazy.scratch.root import ScratchRoot

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
