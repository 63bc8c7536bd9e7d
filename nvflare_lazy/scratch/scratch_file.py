# SPDX-License-Identifier: Apache-2.0
"""One file being received: written from many threads, within the quota, never by a name from outside."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING

from nvflare_lazy.errors import ScratchGoneError
from nvflare_lazy.scratch.account import LOOK_EVERY
from nvflare_lazy.scratch.refusals import named

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Buffer, Self

    from nvflare_lazy.scratch.directory import DownloadDirectory, OpenForWriting

# Between two pieces a write finds out that it is not wanted any more.
_PIECE = 8 << 20


class ScratchFile:
    """A new file in a download's directory; `DownloadScratch.new_file` makes them.

    Holding one keeps the download's directory.

    Args:
        keep_alive: The handle whose end would remove the directory.
        directory: The directory.
        name: The file to create in it.

    Example:
        >>> file = download.new_file()
        >>> file.write(header)
        >>> file.pwrite(tensor_bytes, offset)
        >>> tensors = TensorFile(file.finish())
        >>> tensors.own(download)
    """

    def __init__(self, keep_alive: object, directory: DownloadDirectory, name: str) -> None:
        self.path: Path = directory.path / name
        self._keep_alive = keep_alive
        self._directory = directory
        self._file: OpenForWriting = directory.create(name)
        self._lock = threading.RLock()
        self._position = 0
        self._end = 0
        self._held = 0
        self._pending = 0
        self._unseen = 0
        self._finishing = threading.Lock()
        self._finished = False
        weakref.finalize(self, directory.close, self._file).atexit = False

    @property
    def size(self) -> int:
        """Where the last byte written ends."""
        return self._end

    def write(self, buffer: Buffer) -> int:
        """Write all of a buffer where the last `write` ended; return its number of bytes.

        Raises:
            QuotaExceededError: If the job may not hold that much.
            DiskFullError: If the disk cannot, or should not.
            ReleasedScratchError: If the download was released, be it in the middle of the write.
            ScratchGoneError: If the directory was deleted underneath.
        """
        with _bytes_of(buffer) as view:
            with self._lock:
                offset = self._position
                self._position += len(view)
            return self._write(view, offset)

    def pwrite(self, buffer: Buffer, offset: int) -> int:
        """Write all of a buffer at an offset, from any thread; return its number of bytes.

        Raises as `write` does.
        """
        if offset < 0:
            raise ValueError(f"{self.path} has no offset {offset}")
        with _bytes_of(buffer) as view:
            return self._write(view, offset)

    def preallocate(self, nbytes: int) -> None:
        """Set aside quota, and disk space where that is cheap, for a file of so many bytes.

        What is not written comes back when the file is finished.
        """
        with self._directory.writing(self._file):
            self._hold(nbytes)
            if not (self._directory.preallocates and nbytes):
                return
            try:
                os.posix_fallocate(self._file.fd, 0, nbytes)
            except OSError as error:
                raise named(error, f"set aside {nbytes} bytes for", self.path) from error
            with self._lock:
                there, self._pending = self._pending, 0
            self._directory.allotment.wrote(there)

    def finish(self) -> Path:
        """Close the file and return where it is; from then on it is only read.

        Waits for writes that are running in other threads; later ones raise ValueError.

        Raises:
            ScratchGoneError: If the path does not lead to this file any more.
        """
        with self._finishing:
            if not self._finished:
                self._directory.stop_writing(self._file)
                with self._directory.writing():
                    self._finish()
                self._finished = True
        return self.path

    def close(self) -> None:
        """Close the file as it is, if that has not happened; it stays in the directory until that is released."""
        with self._finishing:
            self._directory.stop_writing(self._file)
            with contextlib.suppress(OSError):
                self._directory.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, view: memoryview, offset: int) -> int:
        with self._directory.writing(self._file):
            self._hold(offset + len(view))
            done = 0
            while done < len(view):
                try:
                    count = os.pwrite(self._file.fd, view[done : done + _PIECE], offset + done)
                except OSError as error:
                    raise named(error, "write to", self.path) from error
                done += count
                self._wrote(offset + done, count)
                self._directory.check_wanted()
        return done

    def _hold(self, end: int) -> None:
        """Hold what a file that ends there has more than before, holes included: they are filled in later."""
        with self._lock:
            more = end - self._held
            if more > 0:
                self._directory.allotment.take(more)
                self._held = end
                self._pending += more

    def _wrote(self, end: int, count: int) -> None:
        with self._lock:
            self._end = max(self._end, end)
            fresh = min(count, self._pending)
            self._pending -= fresh
            self._unseen += count
            look = self._unseen >= LOOK_EVERY
            if look:
                self._unseen = 0
        self._directory.allotment.wrote(fresh)
        if look and not os.fstat(self._file.fd).st_nlink:
            raise self._gone()

    def _finish(self) -> None:
        if not self._directory.is_open(self._file):
            raise ValueError(f"{self.path} was closed before it was finished")
        try:
            status = os.fstat(self._file.fd)
            if status.st_size > self._end:
                os.ftruncate(self._file.fd, self._end)
            self._directory.close(self._file)
            there = os.stat(self.path, follow_symlinks=False)
        except OSError as error:
            raise named(error, "finish", self.path) from error
        if not os.path.samestat(there, status):
            raise self._gone()
        with self._lock:
            self._directory.allotment.give_back(self._held - self._end, self._pending)
            self._held = self._end
            self._pending = 0
        self._directory.completed(self.path.name)

    def _gone(self) -> ScratchGoneError:
        return ScratchGoneError(
            f"{self.path} was deleted while it was being written; keep whatever cleans up there away from scratch roots"
        )


def _bytes_of(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty one cannot always be cast
