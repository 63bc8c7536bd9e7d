# SPDX-License-Identifier: Apache-2.0
"""Remove and measure directory trees without ever following a link or trusting a path twice."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Somebody may still be adding entries; who adds them faster than they go away is not waited for.
_PASSES = 4


def open_directory(name: str | os.PathLike[str], *, dir_fd: int | None = None) -> int:
    """Open a directory itself, never what a link points to."""
    return os.open(name, _OPEN_DIRECTORY, dir_fd=dir_fd)


def make_private_directory(name: str, *, dir_fd: int) -> int:
    """Make a new directory for this user only, whatever the umask; return it open."""
    os.mkdir(name, 0o700, dir_fd=dir_fd)
    # By name: after a strange umask it cannot be opened before that. The parent is ours alone. This also takes away
    # a set-group-ID bit that was inherited.
    os.chmod(name, 0o700, dir_fd=dir_fd)
    return open_directory(name, dir_fd=dir_fd)


def remove_tree(name: str, *, dir_fd: int) -> int:
    """Remove a file or a directory with all that is in it; return the bytes its files had.

    What is gone already is no error, so any number of processes may remove the same tree at once.
    """
    freed = 0
    for attempt in range(_PASSES):
        try:
            with _opened(name, dir_fd) as fd:
                if fd is None:
                    return freed + _unlink(name, dir_fd)
                for child in _names(fd):
                    freed += remove_tree(child, dir_fd=fd)
            os.rmdir(name, dir_fd=dir_fd)
        except FileNotFoundError:
            return freed
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or attempt == _PASSES - 1:
                raise
        else:
            return freed
    raise AssertionError("unreachable")


def tree_size(name: str, *, dir_fd: int) -> int:
    """Return the bytes of all files below a directory; what vanishes meanwhile counts for nothing."""
    size = 0
    with contextlib.suppress(OSError), _opened(name, dir_fd) as fd:
        if fd is None:
            return os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_size
        for child in _names(fd):
            size += tree_size(child, dir_fd=fd)
    return size


@contextlib.contextmanager
def _opened(name: str, dir_fd: int) -> Iterator[int | None]:
    """Open a directory, or give None for what is none."""
    try:
        fd = open_directory(name, dir_fd=dir_fd)
    except PermissionError:
        # Whoever made it died between making it and giving it its mode.
        os.chmod(name, 0o700, dir_fd=dir_fd)
        fd = open_directory(name, dir_fd=dir_fd)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.EMLINK):
            raise
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _names(fd: int) -> list[str]:
    with os.scandir(fd) as entries:
        return [entry.name for entry in entries]


def _unlink(name: str, dir_fd: int) -> int:
    size = os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_size
    os.unlink(name, dir_fd=dir_fd)
    return size
