# SPDX-License-Identifier: Apache-2.0
"""Remove and measure directory trees without ever following a link or trusting a path twice."""

from __future__ import annotations

import contextlib
import errno
import os

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
    return os.open(name, _OPEN_DIRECTORY, dir_fd=dir_fd)


def remove_tree(name: str, *, dir_fd: int) -> None:
    """Remove a directory with all that is in it.

    What is gone already is no error, so any number of processes may remove the same tree at once. `os.fwalk` works on
    descriptors and follows no links; `shutil.rmtree` has `dir_fd` only since Python 3.11.
    """
    for attempt in range(_PASSES):
        try:
            # Without an error: a directory that cannot be read, whose maker died before giving it its mode, is empty.
            for _, directories, files, fd in os.fwalk(name, topdown=False, dir_fd=dir_fd):
                for child in files:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(child, dir_fd=fd)
                for child in directories:
                    _remove_directory(child, fd)
            os.rmdir(name, dir_fd=dir_fd)
        except FileNotFoundError:
            return
        except PermissionError:
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=dir_fd)
                return
            raise
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or attempt == _PASSES - 1:
                raise
        else:
            return


def tree_size(name: str, *, dir_fd: int) -> int:
    """Return the bytes of all files below a directory; what vanishes meanwhile counts for nothing."""
    size = 0
    with contextlib.suppress(OSError):
        for _, _, files, fd in os.fwalk(name, dir_fd=dir_fd):
            for child in files:
                with contextlib.suppress(OSError):
                    size += os.stat(child, dir_fd=fd, follow_symlinks=False).st_size
    return size


def _remove_directory(name: str, dir_fd: int) -> None:
    try:
        os.rmdir(name, dir_fd=dir_fd)
    except FileNotFoundError:
        pass
    except NotADirectoryError:  # a link to one
        os.unlink(name, dir_fd=dir_fd)
