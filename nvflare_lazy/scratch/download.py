# SPDX-License-Identifier: Apache-2.0
"""The directory of one download: alive as long as its tensors are, gone at once when it is aborted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nvflare_lazy.scratch.scratch_file import ScratchFile

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


class DownloadScratch:
    """A leased directory for one download; the `keep_alive` of the files in it."""

    path: Path
    label: str | None

    @property
    def released(self) -> bool:
        """Whether it has been given back."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes held against the quota: what is written, and what is set aside."""
        raise NotImplementedError

    def new_file(self, suffix: str = ".safetensors") -> ScratchFile:
        """Create a file to write to."""
        raise NotImplementedError

    def settle(self) -> None:
        """Give back what was expected and did not come: the download is complete."""
        raise NotImplementedError

    def release(self) -> None:
        """Remove the directory and give its bytes back."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
