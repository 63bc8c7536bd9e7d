# SPDX-License-Identifier: Apache-2.0
"""One file being received: written from many threads, within the quota, never by a name from outside."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from nvflare_lazy.errors import ScratchDeletedError
from nvflare_lazy.scratch._quota import LOOK_EVERY
from nvflare_lazy.scratch._system import named
from nvflare_lazy.tensors.tensor_file import TensorFile

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from nvflare_lazy.scratch.download import DownloadDirectory, OpenForWriting

# Between two pieces a write finds out that it is not wanted any more.
_PIECE = 8 << 20


class ScratchFile:
    """A new file in a download's directory; `DownloadScratch.new_file` makes them.

    Holding one keeps the download's directory.

    Args:
        owner: The handle whose end would remove the directory.
        directory: The directory.
        name: The file to create in it.

    Example:
        >>> file = download.new_file()
        >>> file.pwrite(tensor_bytes, offset)
        >>> received = file.finish()
    """

    def __init__(self, owner: object, directory: DownloadDirectory, name: str) -> None:
        self.path = directory.path / name
        self._owner = owner
        self._directory = directory
        self._file: OpenForWriting = directory.create(name)
        self._lock = threading.RLock()
        self._end = 0  # where the last byte written ends
        self._held = 0
        self._pending = 0
        self._unseen = 0
        weakref.finalize(self, directory.close, self._file).atexit = False

    def pwrite(self, buffer: Buffer, offset: int) -> int:
        """Write all of a buffer at an offset, from any thread; return its number of bytes.

        Raises:
            QuotaExceededError: If the job may not hold that much.
            DiskFullError: If the disk cannot, or should not.
            ScratchReleasedError: If the download was released, be it in the middle of the write.
            ScratchDeletedError: If the directory was deleted underneath.
        """
        if offset < 0:
            raise ValueError(f"{self.path} has no offset {offset}")
        # An empty view cannot always be cast.
        with (
            memoryview(buffer) as view,
            view.cast("B") if view.nbytes else memoryview(b"") as data,
            self._directory.writing(self._file),
        ):
            if offset + len(data) > self._held:
                self._hold(offset + len(data))
            done = 0
            while done < len(data):
                try:
                    count = os.pwrite(self._file.fd, data[done : done + _PIECE], offset + done)
                except OSError as error:
                    raise named(error, "write to", self.path) from error
                done += count
                self._wrote(offset + done, count)
            return done

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

    def finish(self) -> TensorFile:
        """Close the file and return it open for reading; it keeps the download's directory until it is closed.

        Waits for writes that are running in other threads; later ones raise ValueError.

        Raises:
            ScratchDeletedError: If the file's name in the directory does not lead to it any more.
        """
        file = None
        try:
            with self._directory.writing():
                if not self._directory.stop_writing(self._file):
                    raise ValueError(f"{self.path} was finished or closed before")
                try:
                    file = TensorFile(self.path, descriptor=self._reopened())
                finally:
                    self._directory.close(self._file)
                file.own(self._owner)
                self._directory.completed(self.path.name, self._held - self._end, self._pending)
        except BaseException:
            if file is not None:
                file.close()  # the traceback would keep it open
            raise
        return file

    def close(self) -> None:
        """Close the file as it is, if that has not happened; it stays in the directory until that is released."""
        if self._directory.stop_writing(self._file):
            self._directory.close(self._file)

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
        if fresh:
            self._directory.allotment.wrote(fresh)
        if self._directory.released:
            raise self._directory.released_error()
        if look and not os.fstat(self._file.fd).st_nlink:
            raise self._gone()

    def _reopened(self) -> int:
        """Cut the file to what was written and open it for reading: a forked child must not keep it open to write."""
        try:
            status = os.fstat(self._file.fd)
            if status.st_size > self._end:
                os.ftruncate(self._file.fd, self._end)
            readable = self._directory.open(self.path.name)
        except OSError as error:
            raise named(error, "finish", self.path) from error
        if not os.path.samestat(os.fstat(readable), status):
            os.close(readable)
            raise self._gone()
        return readable

    def _gone(self) -> ScratchDeletedError:
        return ScratchDeletedError(
            f"{self.path} was deleted while it was being written; keep whatever cleans up there away from scratch roots"
        )
