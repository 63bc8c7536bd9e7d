# SPDX-License-Identifier: Apache-2.0
"""The directory through which a process gives files to other processes on the same file system, as hard links.

`Rendezvous` is the sender's, in its leased directory. A receiver opens it with `visit`. The transport decides which
files to show and sends their ids; no path travels, and a lease name from a peer is only looked up in the own root.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
import threading
import weakref
from typing import TYPE_CHECKING

from nvflare_lazy.errors import ScratchError, ScratchPermissionError, ScratchReleasedError, TruncatedSourceError
from nvflare_lazy.scratch._lease import boot_id
from nvflare_lazy.scratch._system import (
    close_private,
    keep_private,
    make_private_directory,
    open_directory,
    opened_directory,
    remove_tree,
    to_scratch_error,
)
from nvflare_lazy.scratch.root import open_root
from nvflare_lazy.tensors.tensor_file import TensorFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from nvflare_lazy.scratch.file import ScratchFile

_NAME = "handoff"
_PROBE = "probe"
_SECRET_BYTES = 32
_LEASE = re.compile(r"job-[0-9a-f]{16}")
_ID = re.compile(r"[0-9a-f]{32}")
_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
# Not blocking: a named pipe would wait for its other end.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def host_token(nonce: str) -> str:
    """Return a token that is equal in all processes of a running kernel, and tells other hosts nothing.

    Args:
        nonce: Any text. The sender chooses a new one for each payload.
    """
    return _hmac((boot_id() or os.uname().nodename).encode(), nonce)


class Rendezvous:
    """The shown files of one leased directory; `JobScratch.rendezvous` returns it.

    A shown file has one more name, which is 128 random bits. It is read-only while it is shown.

    Attributes:
        lease: The name of the leased directory, which receivers look up.

    Args:
        job_fd: A descriptor of the leased directory.
        lease: Its name.
    """

    def __init__(self, job_fd: int, lease: str) -> None:
        self.lease = lease
        self._pid = os.getpid()
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        # Reentrant, because finalizers take files back.
        self._lock = threading.RLock()
        # How often each file is shown, and its mode before.
        self._shown: dict[tuple[int, int], tuple[int, int]] = {}
        try:
            self._fd = keep_private(make_private_directory(_NAME, dir_fd=job_fd))
        except OSError as error:
            raise to_scratch_error(error, "make a directory for shared files in", lease) from error
        try:
            self._write_probe()
        except OSError as error:
            self.close()
            remove_tree(_NAME, dir_fd=job_fd)
            raise ScratchError(
                f"cannot share files through {lease}: {error}; use a scratch root on a file system with hard links, "
                "and mount /proc"
            ) from error

    def proof(self, ref_id: str) -> str:
        """Return what only a process that can read this directory can compute for a download."""
        return _hmac(self._secret, ref_id)

    def show(self, fd: int) -> str:
        """Give an open file a name in this directory, and return that name, its id.

        The file is not looked up by a path. Call `take_back` when the payload is released.

        Raises:
            ScratchError: If the file system refuses. Its `errno` is `EXDEV` for a file on another file system.
        """
        if os.getpid() != self._pid:
            raise ScratchError(f"the shared files of {self.lease} belong to process {self._pid}, which forked this one")
        name = secrets.token_hex(16)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise ScratchPermissionError("cannot share a file: it is not a regular file of this user")
            with self._lock:
                self._protect(fd, status)
                try:
                    self._link(fd, name)
                except BaseException:
                    self._unprotect(fd, status)
                    raise
        except ScratchError:
            raise
        except OSError as error:
            raise to_scratch_error(error, "share a file through", self.lease) from error
        return name

    def take_back(self, ids: Iterable[str]) -> None:
        """Remove names; receivers that have taken their link keep the file.

        Names that no longer exist are ignored. Safe to call from a finalizer.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            for name in ids:
                with contextlib.suppress(OSError):
                    fd = os.open(name, _READ, dir_fd=self._fd)
                    try:
                        os.unlink(name, dir_fd=self._fd)
                        self._unprotect(fd, os.fstat(fd))
                    finally:
                        os.close(fd)

    def _write_probe(self) -> None:
        """Write the secret, and name it with a link: this fails if files cannot be linked here."""
        new = f"{_PROBE}.new"
        probe = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        try:
            os.fchmod(probe, 0o600)  # whatever the umask was
            os.write(probe, self._secret)
            self._link(probe, _PROBE)
            os.unlink(new, dir_fd=self._fd)
        finally:
            os.close(probe)

    def _link(self, fd: int, name: str) -> None:
        os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=self._fd, follow_symlinks=True)

    def close(self) -> None:
        """Close the directory, which is removed with the leased one."""
        with self._lock:
            if self._fd >= 0 and os.getpid() == self._pid:
                fd, self._fd = self._fd, -1
                close_private(fd)

    def _protect(self, fd: int, status: os.stat_result) -> None:
        """Make a file read-only, so that no program changes a receiver's file accidentally."""
        key = status.st_dev, status.st_ino
        count, mode = self._shown.get(key, (0, stat.S_IMODE(status.st_mode)))
        os.fchmod(fd, mode & ~_WRITABLE)
        self._shown[key] = count + 1, mode

    def _unprotect(self, fd: int, status: os.stat_result) -> None:
        key = status.st_dev, status.st_ino
        count, mode = self._shown.pop(key, (1, stat.S_IMODE(status.st_mode)))
        if count > 1:
            self._shown[key] = count - 1, mode
        elif mode & _WRITABLE:  # another process that shows the file may have made it read-only, and restores it
            os.fchmod(fd, mode)


class VisitedRendezvous:
    """Another process's directory of shared files, open for a receiver; `visit` returns it."""

    def __init__(self, fd: int, lease: str, secret: bytes) -> None:
        self.lease = lease
        self._fd = fd
        self._secret = secret
        self._finalizer = weakref.finalize(self, _close, keep_private(fd), os.getpid())

    def proof(self, ref_id: str) -> str:
        """Return the proof that this process can read the directory; see `Rendezvous.proof`."""
        return _hmac(self._secret, ref_id)

    def take(self, id: object, nbytes: int, dir_fd: int, path: str | os.PathLike[str]) -> TensorFile:
        """Link a shown file to `path`, in an open directory, and open it there. A failure may leave the link.

        Raises:
            ScratchError: If it was taken back, cannot be linked there, or is not as the sender describes it.
        """
        with self._system_errors("link a shared file to", path):
            name = os.path.basename(path)
            os.link(_checked(id), name, src_dir_fd=self._fd, dst_dir_fd=dir_fd, follow_symlinks=False)
            return self._open(id, nbytes, name, dir_fd, path)

    def open(self, id: object, nbytes: int) -> TensorFile:
        """Open a shown file without a link.

        Raises:
            ScratchError: If it was taken back, or is not as the sender describes it.
        """
        name = _checked(id)
        path = f"{self.lease}/{_NAME}/{name}"
        with self._system_errors("open the shared file", path):
            return self._open(id, nbytes, name, self._fd, path)

    def _open(self, id: object, nbytes: int, name: str, dir_fd: int, path: str | os.PathLike[str]) -> TensorFile:
        fd = os.open(name, _READ, dir_fd=dir_fd)
        try:
            status = os.fstat(fd)
            is_safe = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not stat.S_ISREG(status.st_mode) or not is_safe:
                raise ScratchPermissionError(
                    f"cannot use the shared file {path}: expected a regular file that only this user may write to"
                )
            if status.st_size != nbytes:
                raise ScratchError(f"the shared file {path} has {status.st_size} bytes, expected {nbytes}")
            # After it has taken a file back, the sender looks for links and descriptors, and writes to the file again
            # if it finds none. So a link or descriptor may only be used if the file is still shown after it was made.
            if not os.path.samestat(os.stat(_checked(id), dir_fd=self._fd, follow_symlinks=False), status):
                raise ScratchError(f"the shared file {path} was replaced by another one")
            return TensorFile(path, descriptor=fd, shareable=True)
        except BaseException:
            os.close(fd)
            raise

    @contextlib.contextmanager
    def _system_errors(self, doing: str, path: str | os.PathLike[str]) -> Iterator[None]:
        try:
            yield
        except ScratchError:
            raise
        except FileNotFoundError as error:
            raise ScratchReleasedError(f"cannot {doing} {path}: the sender has taken it back") from error
        except OSError as error:
            raise to_scratch_error(error, doing, path) from error

    def close(self) -> None:
        """Close the directory; a second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def visit(root: Path, lease: object) -> VisitedRendezvous | None:
    """Open the directory of shared files of a lease, or return None if this process cannot take files from there.

    Every step is relative to a descriptor and follows no link. The directories and the probe must belong to this user
    alone.

    Args:
        root: The scratch root of this process, resolved.
        lease: The name from the sender. It is not trusted.
    """
    if not isinstance(lease, str) or not _LEASE.fullmatch(lease):
        return None
    try:
        with contextlib.ExitStack() as opened:
            root_fd = open_root(root)
            opened.callback(os.close, root_fd)
            lease_fd = opened.enter_context(opened_directory(lease, dir_fd=root_fd))
            fd = open_directory(_NAME, dir_fd=lease_fd)
            undo = opened.enter_context(contextlib.ExitStack())
            undo.callback(os.close, fd)
            probe = os.open(_PROBE, _READ, dir_fd=fd)
            opened.callback(os.close, probe)
            if not all(map(_is_private, (lease_fd, fd, probe))) or not stat.S_ISREG(os.fstat(probe).st_mode):
                return None
            secret = os.pread(probe, _SECRET_BYTES + 1, 0)
            if len(secret) != _SECRET_BYTES:
                return None
            undo.pop_all()
            return VisitedRendezvous(fd, lease, secret)
    except OSError:
        return None


def open_shown(visited: VisitedRendezvous, id: object, nbytes: int) -> TensorFile:
    """Open a shown file for reading, without a link; see `VisitedRendezvous.open`."""
    return visited.open(id, nbytes)


def is_ours(file: TensorFile) -> bool:
    """Whether this package wrote a file, and no program writes to it again, so that it may be shown as it is."""
    if not file.shareable:
        return False
    try:
        with file.descriptor() as fd:
            status = os.fstat(fd)
    except OSError:
        return False
    return bool(status.st_nlink) and status.st_uid == os.geteuid()


def copy_ranges(source_fd: int, ranges: Iterable[tuple[int, int, int]], file: ScratchFile) -> None:
    """Copy ranges of an open file to a scratch file, as shared blocks where the file system can.

    Args:
        source_fd: The file to copy from.
        ranges: Start in the source, number of bytes, start in the scratch file. See `ScratchFile.copy_from`.
        file: The scratch file. Its `ScratchReleasedError`, `QuotaExceededError` and `DiskFullError` end the copy.

    Raises:
        TruncatedSourceError: If the source is shorter than that.
    """
    for start, nbytes, at in ranges:
        if file.copy_from(source_fd, start, nbytes, at) != nbytes:
            raise TruncatedSourceError(f"cannot copy to {file.path}: the source was cut short after it was opened")


def _checked(id: object) -> str:
    """Return an id from a sender if it is one; it becomes a file name."""
    if not isinstance(id, str) or not _ID.fullmatch(id):
        raise ScratchError("invalid id of a shared file: expected 32 hexadecimal digits")
    return id


def _is_private(fd: int) -> bool:
    status = os.fstat(fd)
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS


def _hmac(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


def _close(fd: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has closed its copy
        close_private(fd)
