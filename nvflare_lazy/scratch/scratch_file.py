# SPDX-License-Identifier: Apache-2.0
"""One file being received: written from many threads, within the quota, never by a name from outside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer, Self


class ScratchFile:
    """A new file in a download's directory."""

    path: Path

    @property
    def size(self) -> int:
        """End of the last byte written."""
        raise NotImplementedError

    def write(self, buffer: Buffer) -> int:
        """Append all of a buffer; return its number of bytes."""
        raise NotImplementedError

    def pwrite(self, buffer: Buffer, offset: int) -> int:
        """Write all of a buffer at an offset; return its number of bytes."""
        raise NotImplementedError

    def preallocate(self, nbytes: int) -> None:
        """Set aside quota, and disk space where that is cheap, for a file of so many bytes."""
        raise NotImplementedError

    def finish(self) -> Path:
        """Close the file and return where it is."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file without the checks of finish."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
