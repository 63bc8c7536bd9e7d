# SPDX-License-Identifier: Apache-2.0
"""`SharedDirectory`: the unfinished files of an aggregation, and a token that its workers must be able to read."""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from nvflare_lazy._text import get_logger
from nvflare_lazy.tensors.byte_source import ByteSource
from nvflare_lazy.tensors.tensor_file import TensorFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

logger = get_logger(__name__)

COPY_BYTES = 8 << 20
_SUFFIX = ".parts"
SESSION_FILE = "session"
_REVOKED_FILE = "revoked"


class SharedDirectory:
    """A hidden directory next to an output, with the unfinished files and a token that workers must be able to read.

    A part stops when the token is renamed. The directory is removed at the end of its block; one that a killed process
    has left is removed by the next aggregation to the same output.

    Args:
        output: The file that will be written; for a URL, one in scratch.
    """

    def __init__(self, output: str) -> None:
        directory, name = os.path.split(output)
        while not os.path.isdir(directory):
            directory = os.path.dirname(directory)
        start = f".{os.fsdecode(os.fsencode(name)[:200])}."
        _remove_abandoned(directory, start)
        self.path = os.path.join(directory, f"{start}{secrets.token_hex(8)}{_SUFFIX}")
        os.mkdir(self.path, 0o700)
        self.token = secrets.token_hex(16)
        self._copies: dict[int, tuple[ByteSource, TensorFile]] = {}
        self._lock_fd = os.open(os.path.join(self.path, SESSION_FILE), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with suppress(OSError):  # without locks in the file system, an abandoned directory stays
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._lock_fd, self.token.encode())
        os.fsync(self._lock_fd)

    def copy_of(self, source: ByteSource) -> TensorFile:
        """Return a file with the bytes of a source that only this process can read; it is written once."""
        known = self._copies.get(id(source))
        if known is not None:
            return known[1]
        path = os.path.join(self.path, f"input-{len(self._copies)}")
        with open(path, "xb", buffering=0) as file:
            for begin in range(0, source.nbytes, COPY_BYTES):
                data = memoryview(source.read(begin, min(COPY_BYTES, source.nbytes - begin)))
                while data:
                    data = data[file.write(data) :]
        copy = TensorFile(path)
        self._copies[id(source)] = (source, copy)
        return copy

    def revoke(self) -> None:
        """Stop the parts that are still running."""
        with suppress(FileNotFoundError):
            # Renamed, so that the lock still tells the next aggregation whether this process was killed.
            os.rename(os.path.join(self.path, SESSION_FILE), os.path.join(self.path, _REVOKED_FILE))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.revoke()
        os.close(self._lock_fd)
        self._copies.clear()
        try:
            _remove_shared(self.path)
        except OSError as problem:
            logger.warning("Cannot remove %s: %s. Remove it by hand.", self.path, problem)


def _remove_abandoned(directory: str, start: str) -> None:
    for name in os.listdir(directory):
        if not (name.startswith(start) and name.endswith(_SUFFIX)):
            continue
        path = os.path.join(directory, name)
        for token_name in (SESSION_FILE, _REVOKED_FILE):
            with (
                suppress(OSError),
                _opened_directory(path) as fd,
                # For writing, which a lock on NFS needs.
                open(token_name, "r+b", opener=partial(_open_in, fd)) as token,
            ):
                fcntl.flock(token, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if token.read():
                    logger.info("Removing %s, which a killed process has left", path)
                    _remove_shared(path)


def _remove_shared(path: str) -> None:
    """Remove a shared directory; the token is last, since a directory without it cannot be recognized as abandoned."""
    with _opened_directory(path) as fd:
        tokens = (SESSION_FILE, _REVOKED_FILE)
        for name in sorted(os.listdir(fd), key=tokens.__contains__):
            os.unlink(name, dir_fd=fd)
    os.rmdir(path)


@contextmanager
def _opened_directory(path: str) -> Iterator[int]:
    """Lend a descriptor of a directory, but not of a link: in a directory such as /var/tmp, others may create them."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_in(directory: int, name: str, flags: int) -> int:
    # Opening a pipe would wait for its other end.
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
