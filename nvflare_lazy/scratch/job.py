# SPDX-License-Identifier: Apache-2.0
"""The scratch of one job in one process: a leased directory, a quota, and the downloads in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from nvflare_lazy.scratch.download import DownloadScratch
from nvflare_lazy.scratch.file_systems import RootReport
from nvflare_lazy.scratch.reclaim import Reclaimed

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


class JobScratch:
    """A leased directory for all that a job receives."""

    path: Path
    job: str
    report: RootReport
    reclaimed: tuple[Reclaimed, ...]

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
        """Reclaim what dead owners left, then lease a directory."""
        raise NotImplementedError

    @property
    def quota(self) -> int | None:
        """Most bytes the job may hold."""
        raise NotImplementedError

    @property
    def used(self) -> int:
        """Bytes held now."""
        raise NotImplementedError

    @property
    def peak(self) -> int:
        """Most bytes ever held."""
        raise NotImplementedError

    @property
    def released(self) -> bool:
        """Whether it has been given back."""
        raise NotImplementedError

    def free(self) -> int:
        """Bytes that could be written now."""
        raise NotImplementedError

    def download(self, label: str | None = None, expect: int | None = None) -> DownloadScratch:
        """Lease a directory for one download."""
        raise NotImplementedError

    def release(self) -> None:
        """Release all downloads, then the directory and its lease."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
