# SPDX-License-Identifier: Apache-2.0
"""What a receiver holds of one download's directory: alive as long as its tensors are, gone at once on an abort."""

from __future__ import annotations

import itertools
import re
import weakref
from typing import TYPE_CHECKING

from nvflare_lazy.scratch.scratch_file import ScratchFile

if TYPE_CHECKING:
    from pathlib import Path

    from nvflare_lazy.scratch.directory import DownloadDirectory

_SUFFIX = re.compile(r"(\.[A-Za-z0-9]{1,20}){0,2}")


class DownloadScratch:
    """A leased directory for one download; `JobScratch.download` makes them.

    It owns the files in it: call `file.own(download)` for a `TensorFile`, and the directory is removed with the last
    tensor of it. `release` does not wait for that: it stops what is still being written and
    removes the directory now. Files that are open for reading stay readable until they are closed.

    Args:
        keep_alive: The job's handle, whose end would remove all its downloads.
        directory: The directory.

    Example:
        >>> download = job.download("result of site-1")
        >>> file = download.new_file()
    """

    def __init__(self, keep_alive: object, directory: DownloadDirectory) -> None:
        self.path: Path = directory.path
        self._keep_alive = keep_alive
        self._directory = directory
        self._numbers = itertools.count(1)
        # Runs at the end of the interpreter, too.
        self._finalizer = weakref.finalize(self, directory.release, wait=False)

    @property
    def released(self) -> bool:
        """Whether it has been released, or is being."""
        return self._directory.released

    @property
    def nbytes(self) -> int:
        """Bytes it holds of the job's quota: what is written, and what is expected or set aside."""
        return self._directory.allotment.nbytes

    def adopt(self, name: str) -> None:
        """Count a file that was written here by other means, such as an atomic file, and settle what was expected.

        Adopting a file once more counts what it has now, and returns the bytes of adopted files that are gone.

        Raises:
            QuotaExceededError: If the job may not hold that much; the file stays where it is.
            ScratchDeletedError: If there is no such file.
            ScratchError: If it is not a regular file directly in this directory.
        """
        self._directory.adopt(name)

    def new_file(self, suffix: str = ".safetensors") -> ScratchFile:
        """Create a file, named by this package, and open it for writing.

        What is not written of it is undefined, not zero: it may be a file that was used before.
        """
        if not _SUFFIX.fullmatch(suffix):
            raise ValueError(f"{suffix!r} is not a suffix such as '.safetensors'")
        return ScratchFile(self, self._directory, f"{next(self._numbers):05d}{suffix}")

    def release(self) -> None:
        """Remove the directory and return its bytes; when this returns, it is gone.

        Writes that are running in other threads end with ScratchReleasedError, and are waited for. May be called any
        number of times, from any thread.
        """
        self._finalizer.detach()
        self._directory.release()

    def __repr__(self) -> str:
        return f"<DownloadScratch {self._directory.title} at {self.path}{', released' if self.released else ''}>"
