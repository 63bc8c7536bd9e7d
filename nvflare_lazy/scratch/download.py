# SPDX-License-Identifier: Apache-2.0
"""One download's directory: removed with the last reference to its tensors, or at once on an abort.

`DownloadScratch` is the handle that receivers and files hold. `DownloadDirectory` is the body. It does not refer to
the handle, so that the directory is removed with the last reference to the handle.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
import threading
import time
import weakref
from typing import TYPE_CHECKING

from nvflare_lazy._text import get_logger
from nvflare_lazy.errors import ScratchError, ScratchReleasedError
from nvflare_lazy.scratch._system import (
    close_private,
    keep_private,
    make_private_directory,
    remove_tree,
    to_scratch_error,
)
from nvflare_lazy.scratch.file import ScratchFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nvflare_lazy.scratch._quota import QuotaReservation
    from nvflare_lazy.scratch._recycled_files import RecycledFiles
    from nvflare_lazy.scratch.rendezvous import VisitedRendezvous
    from nvflare_lazy.tensors.tensor_file import TensorFile

logger = get_logger(__name__)

_SUFFIX = re.compile(r"(\.[A-Za-z0-9]{1,20}){0,2}")
# A write is made in pieces and stops at the next one after a release, so a longer one means a disk that hangs.
_SLOW_WRITE_SECONDS = 10.0


class DownloadScratch:
    """A leased directory for one download; `JobScratch.download` creates them.

    Its files own it, so that the directory is removed with the last tensor of them. `release` does not wait for that:
    it stops running writes and removes the directory now. Files that are open for reading stay readable until they are
    closed.

    Example:
        >>> download = job.download("result of site-1")
        >>> file = download.new_file()
    """

    def __init__(self, owner: object, directory: DownloadDirectory) -> None:
        self.path: Path = directory.path
        self._owner = owner
        self._directory = directory
        self._numbers = itertools.count(1)
        # Also runs at the end of the interpreter.
        self._finalizer = weakref.finalize(self, directory.release, wait=False)

    def adopt(self, name: str) -> None:
        """Count a file that was written to the directory by other means, for example as an atomic file.

        The file takes the bytes reserved for the download, and the rest of them is released. Adopting a file again
        counts its present size, and releases the bytes of adopted files that no longer exist.

        Args:
            name: The file's name in the directory.

        Raises:
            QuotaExceededError: If the job may not hold that much; the file stays where it is.
            ScratchDeletedError: If the file does not exist.
            ScratchError: If it is not a regular file directly in this directory.
        """
        self._directory.adopt(name)

    def new_file(self, suffix: str = ".safetensors") -> ScratchFile:
        """Create a file, named by this package, and open it for writing.

        Bytes of it that are not written are undefined, not zero: it may be a recycled file.
        """
        if not _SUFFIX.fullmatch(suffix):
            raise ValueError(f"invalid suffix {suffix!r}: expected for example '.safetensors'")
        return ScratchFile(self, self._directory, f"{next(self._numbers):05d}{suffix}")

    def take_link(self, visited: VisitedRendezvous, id: object, nbytes: int) -> TensorFile:
        """Link a file of another process into the directory, and return it open; it owns the directory.

        Nothing is written to it, and it is not recycled. It counts towards the quota, but needs no free space. After a
        failure, no directory is left or counted.

        Args:
            visited: The directory in which the sender shows the file.
            id: Its id from the sender.
            nbytes: Its size, as the sender describes it.

        Raises:
            QuotaExceededError: If the job may not hold that much.
            ScratchError: If the file was taken back, is not as described, or cannot be linked here.
        """
        file = self._directory.take_link(visited, id, f"{next(self._numbers):05d}.safetensors", nbytes)
        file.own(self)
        return file

    def drop_link(self, file: TensorFile) -> None:
        """Undo `take_link`: the file is closed, its link is removed, and it no longer counts."""
        file.close()
        self._directory.drop_link(os.path.basename(file.path), file.size)

    def release(self) -> None:
        """Remove the directory and release its bytes; when this returns, it is gone.

        Writes that are running in other threads end with ScratchReleasedError, and are waited for. Repeated calls are
        allowed, from any thread.
        """
        self._finalizer.detach()
        self._directory.release()

    def __repr__(self) -> str:
        released = ", released" if self._directory.released else ""
        return f"<DownloadScratch {self._directory.title} at {self.path}{released}>"


class OpenScratchFile:
    """A file that is open for writing."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.closing = False


class DownloadDirectory:
    """A directory that ends deterministically, however many threads write to it.

    The descriptor of the job's directory is borrowed. `on_removed` runs with the name after the removal.
    """

    def __init__(
        self,
        job_fd: int,
        job_path: Path,
        name: str,
        *,
        label: str | None,
        reservation: QuotaReservation,
        preallocates: bool,
        recycled_files: RecycledFiles | None,
        on_removed: Callable[[str], object],
    ) -> None:
        self.name = name
        self.path = job_path / name
        self.title = name if label is None else f"{label[:80]!r}"
        self.reservation = reservation
        self.preallocates = preallocates
        self.released = False
        self._job_fd = job_fd
        self._recycled_files = recycled_files
        self._complete: set[str] = set()
        self._adopted: dict[str, int] = {}
        self._on_removed = on_removed
        self._pid = os.getpid()
        # Reentrant, because a finalizer or a signal handler may interrupt any of the blocks below.
        self._change = threading.Condition(threading.RLock())
        self._writers: list[tuple[int, OpenScratchFile | None]] = []
        self._open: set[OpenScratchFile] = set()
        self._releaser = 0
        self._removed = threading.Event()
        try:
            self._fd = keep_private(make_private_directory(name, dir_fd=job_fd))
        except OSError as error:
            raise to_scratch_error(error, "make a directory for a download in", job_path) from error

    @contextlib.contextmanager
    def writing(self, file: OpenScratchFile | None = None) -> Iterator[None]:
        """Keep the directory, and the file, from being closed while the block runs.

        Raises:
            ScratchReleasedError: If the directory was released before, or is when the block is left.
        """
        if os.getpid() != self._pid:
            raise ScratchError(
                f"the scratch of download {self.title} belongs to process {self._pid}, which forked this one; open a "
                "JobScratch in each process"
            )
        writer = threading.get_ident(), file
        with self._change:
            if self.released:
                raise self.released_error()
            if file is not None and file.closing:
                raise ValueError(f"cannot write to a file of download {self.title} after it was finished or closed")
            self._writers.append(writer)
        try:
            yield
        except ScratchError as error:
            if self.released:  # which may be why the block failed
                raise self.released_error() from error
            raise
        else:
            if self.released:
                raise self.released_error()
        finally:
            with self._change:
                self._writers.remove(writer)
                self._change.notify_all()
                if self._removed.is_set() and not self._writers:
                    self._close_descriptors()

    def released_error(self) -> ScratchReleasedError:
        """Return the error for a use after the release."""
        return ScratchReleasedError(f"the scratch of download {self.title} was released")

    def create(self, file_name: str) -> OpenScratchFile:
        """Create a file for this user only, or take a recycled one with its old bytes, and open it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self.writing():
            try:
                fd = None
                if self._recycled_files is not None and self._recycled_files.files:
                    fd = self._recycled_files.take(file_name, self._fd)
                if fd is None:
                    fd = os.open(file_name, flags, 0o600, dir_fd=self._fd)
            except OSError as error:
                raise to_scratch_error(error, "create a file in", self.path) from error
            file = OpenScratchFile(keep_private(fd))
            self._open.add(file)
            os.fchmod(fd, 0o600)  # whatever the umask was
        return file

    def open(self, file_name: str) -> int:
        """Open a file of the directory itself for reading, never the target of a link."""
        # Not blocking: a named pipe would wait for its other end.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(file_name, flags, dir_fd=self._fd)

    def adopt(self, file_name: str) -> None:
        """Count a file in the directory that was written by other means."""
        if os.path.basename(file_name) != file_name:
            raise ScratchError(f"invalid file name {file_name!r}: expected the name of a file in {self.path}")
        with self.writing():
            try:
                fd = self.open(file_name)
                status = os.fstat(fd)
                os.close(fd)
            except OSError as error:
                raise to_scratch_error(error, "adopt", self.path / file_name) from error
            if not stat.S_ISREG(status.st_mode):
                raise ScratchError(f"cannot adopt {self.path / file_name}: it is not a regular file")
            with self._change:
                for name in self._adopted.keys() - set(os.listdir(self._fd)):
                    self.reservation.release_unused(self._adopted.pop(name), 0)
                self.reservation.adopt(self._adopted.get(file_name, 0), status.st_size)
                self._adopted[file_name] = status.st_size

    def take_link(self, visited: VisitedRendezvous, id: object, file_name: str, nbytes: int) -> TensorFile:
        """Link a shown file into the directory and open it."""
        path = self.path / file_name
        with self.writing():
            self.reservation.adopt(0, nbytes)
            try:
                return visited.take(id, nbytes, self._fd, path)
            except BaseException:
                self.drop_link(file_name, nbytes)
                raise

    def drop_link(self, file_name: str, nbytes: int) -> None:
        """Remove a link and release its bytes; those of a released directory are released with it."""
        with contextlib.suppress(ScratchReleasedError), self.writing():
            with contextlib.suppress(OSError):
                os.unlink(file_name, dir_fd=self._fd)
            self.reservation.release_unused(nbytes, 0)

    def record_complete(self, file_name: str, unused: int, pending: int) -> None:
        """Record that a file was received completely: only such files are recycled.

        Releases the `unused` bytes reserved for it beyond its end. `pending` of its bytes are not going to be written.
        """
        self._complete.add(file_name)
        self.reservation.release_unused(unused, pending)

    def stop_writing(self, file: OpenScratchFile) -> bool:
        """Refuse further writes to a file, and wait for those in other threads; False if that has happened before."""
        if os.getpid() != self._pid:
            return False
        with self._change:
            if file.closing:
                return False
            file.closing = True
            self._wait_for_writers(lambda written: written is file)
            return True

    def close(self, file: OpenScratchFile) -> None:
        """Close a file that no thread writes to; repeated calls are allowed."""
        if os.getpid() != self._pid:
            return
        # Without a lock, because finalizers call this; of two callers, the set lets one.
        try:
            self._open.remove(file)
        except KeyError:
            return
        close_private(file.fd)

    def release(self, *, wait: bool = True) -> None:
        """Stop the writers, remove the directory and release its bytes; all that is done when this returns.

        Without `wait`, it does not wait for another thread that is already releasing it.
        """
        if os.getpid() != self._pid:
            return
        me = threading.get_ident()
        with self._change:
            first = not self.released
            if first:
                self.released = True
                self._releaser = me
                self._wait_for_writers(lambda file: True)
                if not self._writers:
                    self._close_descriptors()
        if first:
            self._remove()
        elif wait and self._releaser != me:
            self._removed.wait(2 * _SLOW_WRITE_SECONDS)

    def _wait_for_writers(self, selects: Callable[[OpenScratchFile | None], bool]) -> None:
        """Wait until no other thread is writing.

        The calling thread itself may be: a signal handler runs in the middle of its write, and waiting for that would
        never end. Its descriptors are then closed when the write ends.
        """
        if not self._writers:
            return
        me = threading.get_ident()
        deadline = time.monotonic() + _SLOW_WRITE_SECONDS
        while any(thread != me and selects(file) for thread, file in self._writers):
            left = deadline - time.monotonic()
            if left <= 0 or not self._change.wait(left):
                logger.warning(
                    "A write to %s has been hanging for %g s; not waiting for it", self.path, _SLOW_WRITE_SECONDS
                )
                return

    def _close_descriptors(self) -> None:
        while self._open:
            with contextlib.suppress(KeyError, OSError):
                close_private(self._open.pop().fd)
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            close_private(fd)

    def _remove(self) -> None:
        if self._recycled_files is not None:
            self._recycled_files.recycle(self.name, tuple(self._complete))
        try:
            remove_tree(self.name, dir_fd=self._job_fd)
        except OSError as error:
            # Its bytes stay counted, because they stay on the disk; the end of the job tries again.
            logger.warning("Cannot remove %s yet: %s", self.path, error)
        else:
            self.reservation.close()
        finally:
            with self._change:
                self._removed.set()
                if not self._writers:
                    self._close_descriptors()
            self._on_removed(self.name)
