# SPDX-License-Identifier: Apache-2.0
"""`ScratchFile`: a file for received tensors, written from many threads, within the quota.

Its name is generated; names from a sender are never used in paths.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import weakref
from typing import TYPE_CHECKING

from nvflare_lazy.errors import ScratchDeletedError
from nvflare_lazy.scratch._quota import CHECK_INTERVAL_BYTES
from nvflare_lazy.scratch._system import to_scratch_error
from nvflare_lazy.tensors.tensor_file import TensorFile

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from nvflare_lazy.scratch.download import DownloadDirectory, OpenScratchFile

# Shares blocks of two files; on Linux for all architectures but MIPS, PowerPC and SPARC, where it is refused.
_FICLONERANGE = 0x4020940D
# A write stops between two pieces if the download was released.
_PIECE = 8 << 20
# Of all usual file systems.
_BLOCK_BYTES = 4096
# Stays in the processor's cache.
_TILE_BYTES = 2 << 20


class ScratchFile:
    """A new file in a download's directory, which it keeps; `DownloadScratch.new_file` creates them.

    Example:
        >>> file = download.new_file()
        >>> file.pwrite(tensor_bytes, offset)
        >>> received = file.finish()
    """

    def __init__(self, owner: object, directory: DownloadDirectory, name: str) -> None:
        self.path = directory.path / name
        self._owner = owner
        self._directory = directory
        self._file: OpenScratchFile = directory.create(name)
        self._lock = threading.RLock()
        self._end = 0  # of the bytes written so far
        self._reserved = 0
        self._pending = 0  # reserved, not written
        self._unchecked = 0  # written since the last check that the file has a name
        self._close = weakref.finalize(self, directory.close, self._file)
        self._close.atexit = False

    def pwrite(self, buffer: Buffer, offset: int) -> int:
        """Write all of a buffer at an offset, from any thread; return its number of bytes.

        Raises:
            QuotaExceededError: If the job may not hold that much.
            DiskFullError: If the disk cannot, or should not.
            ScratchReleasedError: If the download was released, even in the middle of the write.
            ScratchDeletedError: If the file was deleted by another program.
        """
        if offset < 0:
            raise ValueError(f"offset must be >= 0, got {offset}")
        with (
            memoryview(buffer) as view,
            view.cast("B") if view.nbytes else memoryview(b"") as data,  # an empty view cannot always be cast
            self._directory.writing(self._file),
        ):
            if offset + len(data) > self._reserved:
                self._reserve(offset + len(data))
            done = 0
            while done < len(data):
                try:
                    count = os.pwrite(self._file.fd, data[done : done + _PIECE], offset + done)
                except OSError as error:
                    raise to_scratch_error(error, "write to", self.path) from error
                done += count
                self._record_written(offset + done, count)
            return done

    def copy_from(self, source_fd: int, start: int, nbytes: int, offset: int) -> int:
        """Copy bytes of an open file that start at `start`; return their number, less if the source ends before.

        If both positions are at the same place within a block, and the file system supports it, the blocks are shared
        instead. Raises the errors of `pwrite`.
        """
        head = min(-start % _BLOCK_BYTES, nbytes)
        shared = (nbytes - head) // _BLOCK_BYTES * _BLOCK_BYTES
        is_aligned = (start - offset) % _BLOCK_BYTES == 0
        if not (is_aligned and shared and self._share_blocks(source_fd, start + head, shared, offset + head)):
            return self._copy(source_fd, start, nbytes, offset)
        tail = head + shared
        done = shared + self._copy(source_fd, start, head, offset)
        return done + self._copy(source_fd, start + tail, nbytes - tail, offset + tail)

    def _share_blocks(self, source_fd: int, start: int, nbytes: int, offset: int) -> bool:
        with self._directory.writing(self._file):
            if offset + nbytes > self._reserved:
                self._reserve(offset + nbytes)
            try:
                fcntl.ioctl(self._file.fd, _FICLONERANGE, struct.pack("=qQQQ", source_fd, start, nbytes, offset))
            except OSError:
                return False  # not with this file system, or not with these two files
            self._record_written(offset + nbytes, nbytes)
            return True

    def _copy(self, source_fd: int, start: int, nbytes: int, offset: int) -> int:
        tile = memoryview(bytearray(min(nbytes, _TILE_BYTES)))
        done = 0
        while done < nbytes:
            try:
                count = os.preadv(source_fd, [tile[: nbytes - done]], start + done)
            except OSError as error:
                raise to_scratch_error(error, "copy to", self.path) from error
            if not count:
                break
            done += self.pwrite(tile[:count], offset + done)
        return done

    def preallocate(self, nbytes: int) -> None:
        """Reserve quota, and disk space where that is cheap, for a file of this size.

        Bytes that are not written are released when the file is finished.
        """
        with self._directory.writing(self._file):
            self._reserve(nbytes)
            if not (self._directory.preallocates and nbytes):
                return
            try:
                os.posix_fallocate(self._file.fd, 0, nbytes)
            except OSError as error:
                raise to_scratch_error(error, f"reserve {nbytes} bytes for", self.path) from error
            with self._lock:
                on_disk, self._pending = self._pending, 0
            self._directory.reservation.record_written(on_disk)

    def release_tail(self, end: int) -> None:
        """Release quota and disk space beyond an offset, or beyond the last byte written; later writes reserve theirs.

        No other thread may write during the call.
        """
        with self._directory.writing(self._file), self._lock:
            end = max(end, self._end)
            unused = self._reserved - end
            if unused <= 0:
                return
            try:
                if os.fstat(self._file.fd).st_size > end:
                    os.ftruncate(self._file.fd, end)
            except OSError as error:
                raise to_scratch_error(error, "shorten", self.path) from error
            pending = min(self._pending, unused)
            self._reserved = end
            self._pending -= pending
            self._directory.reservation.release_unused(unused, pending)

    def finish(self) -> TensorFile:
        """Close the file and return it open for reading; it owns the download's directory.

        Waits for writes that are running in other threads; later ones raise ValueError.

        Raises:
            ScratchDeletedError: If its name in the directory is missing, or names another file.
        """
        file = None
        try:
            with self._directory.writing():
                if not self._directory.stop_writing(self._file):
                    raise ValueError(f"{self.path} is already finished or closed")
                try:
                    file = TensorFile(self.path, descriptor=self._reopen(), shareable=True)
                finally:
                    self._close()
                file.own(self._owner)
                self._directory.record_complete(self.path.name, self._reserved - self._end, self._pending)
        except BaseException:
            if file is not None:
                file.close()  # the traceback would keep it open
            raise
        return file

    def close(self) -> None:
        """Close the file as it is, unless it is closed; it stays in the directory until that is released."""
        if self._directory.stop_writing(self._file):
            self._close()

    def _reserve(self, end: int) -> None:
        """Reserve what a file that ends there needs in addition, holes included: they are filled in later."""
        with self._lock:
            more = end - self._reserved
            if more > 0:
                self._directory.reservation.assign(more)
                self._reserved = end
                self._pending += more

    def _record_written(self, end: int, count: int) -> None:
        with self._lock:
            self._end = max(self._end, end)
            fresh = min(count, self._pending)
            self._pending -= fresh
            self._unchecked += count
            check = self._unchecked >= CHECK_INTERVAL_BYTES
            if check:
                self._unchecked = 0
        if fresh:
            self._directory.reservation.record_written(fresh)
        if self._directory.released:
            raise self._directory.released_error()
        if check and not os.fstat(self._file.fd).st_nlink:
            raise self._deleted_error()

    def _reopen(self) -> int:
        """Truncate the file to the written bytes, and open it for reading.

        Not the descriptor it was written with: forked children close that, and have to keep this one.
        """
        try:
            status = os.fstat(self._file.fd)
            if status.st_size > self._end:
                os.ftruncate(self._file.fd, self._end)
            readable = self._directory.open(self.path.name)
        except OSError as error:
            raise to_scratch_error(error, "finish", self.path) from error
        if not os.path.samestat(os.fstat(readable), status):
            os.close(readable)
            raise self._deleted_error()
        return readable

    def _deleted_error(self) -> ScratchDeletedError:
        return ScratchDeletedError(
            f"{self.path} was deleted while it was being written; exclude scratch roots from cleanup tools"
        )
