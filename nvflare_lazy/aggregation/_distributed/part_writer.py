# SPDX-License-Identifier: Apache-2.0
"""`PartWriter`: writes ranges of tensors, in a worker, to the unfinished files of an output."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nvflare_lazy.errors import AggregationCancelledError, DiskFullError
from nvflare_lazy.formats.atomic_file import OUT_OF_SPACE, begin_writeback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Buffer, Self

_FLUSH_BYTES = 32 << 20


class PartWriter:
    """Writes ranges of tensors to the unfinished files of an output.

    Args:
        locations: For each tensor, the file and the position of the first byte of the range.
        is_revoked: Whether the aggregation has ended without this part.
        fsync: Whether `finish` flushes to the disk.
    """

    def __init__(
        self, locations: Mapping[str, tuple[str, int]], is_revoked: Callable[[], bool], *, fsync: bool
    ) -> None:
        self._locations = locations
        self._is_revoked = is_revoked
        self._fsync = fsync
        self._unflushed = 0
        self._files: dict[str, int] = {}
        try:
            for path, _ in locations.values():
                if path not in self._files:
                    # Only for writing: an NFS client that has read a page may write the complete page.
                    self._files[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except BaseException:
            self.close()
            raise

    def position(self, name: str) -> int:
        """Return where in its file the first byte of a range goes."""
        return self._locations[name][1]

    def write(self, name: str, offset: int, data: Buffer) -> None:
        """Write bytes of a tensor at an offset in its range."""
        path, start = self._locations[name]
        view, done = memoryview(data).cast("B"), 0
        fd = self._files[path]
        # Another worker may have repeated this part, and the result may be published. Until then the inputs were
        # unchanged, so bytes that were computed before this check are correct, whenever they arrive.
        if self._is_revoked():
            raise AggregationCancelledError(f"the aggregation that writes {path} has ended")
        try:
            while done < len(view):
                done += os.pwrite(fd, view[done:], start + offset + done)
        except OSError as error:
            if error.errno not in OUT_OF_SPACE:
                raise
            raise DiskFullError(
                error.errno, f"no space for {path} ({error.strerror}), nothing was written; free some space"
            ) from error
        self._unflushed += done
        if self._fsync and self._unflushed >= _FLUSH_BYTES:
            self._unflushed = 0
            begin_writeback(fd)

    def finish(self) -> None:
        """Have the bytes on the disk, if that is required."""
        if self._fsync:
            for fd in self._files.values():
                os.fsync(fd)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            # With a network file system, closing sends written data, and may fail.
            os.close(self._files.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
