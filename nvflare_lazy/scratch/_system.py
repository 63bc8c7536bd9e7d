# SPDX-License-Identifier: Apache-2.0
"""Directory operations relative to descriptors, descriptors closed in forked processes, and system errors.

No function follows a link or looks a path up twice. All of scratch uses them.
"""

from __future__ import annotations

import contextlib
import errno
import os

from nvflare_lazy.errors import DiskFullError, ScratchDeletedError, ScratchError, ScratchPermissionError

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Another thread may still be adding entries.
_MAX_PASSES = 4
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_GONE = {errno.ENOENT, errno.ESTALE}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}

# Descriptors that must not outlive their process in a forked child. A child shares its parent's open files, locks
# included: a worker process that outlives a killed parent would make its scratch look used, and keep the space of
# deleted files.
_private: set[int] = set()


def open_directory(name: str | os.PathLike[str], *, dir_fd: int | None = None) -> int:
    """Open a directory itself, never the target of a link."""
    return os.open(name, _OPEN_DIRECTORY, dir_fd=dir_fd)


def make_private_directory(name: str, *, dir_fd: int) -> int:
    """Create a directory for this user only, whatever the umask; return it open."""
    os.mkdir(name, 0o700, dir_fd=dir_fd)
    # By name: after a strange umask it cannot be opened before that. The parent is ours alone. This also takes away
    # a set-group-ID bit that was inherited.
    os.chmod(name, 0o700, dir_fd=dir_fd)
    return os.open(name, _OPEN_DIRECTORY, dir_fd=dir_fd)


def remove_tree(name: str, *, dir_fd: int) -> None:
    """Remove a directory and everything in it.

    Missing entries are no error, so any number of processes may remove the same tree at the same time. `os.fwalk`
    works on descriptors and follows no links; `shutil.rmtree` accepts `dir_fd` only since Python 3.11.
    """
    for attempt in range(_MAX_PASSES):
        try:
            # It skips directories that it cannot read: their creator ended before it set their mode, so they are empty.
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
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or attempt == _MAX_PASSES - 1:
                raise
        else:
            return


def tree_size(name: str, *, dir_fd: int) -> int:
    """Return the size of all files below a directory; files that are removed meanwhile are not counted."""
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


def keep_private(fd: int) -> int:
    """Make forked children close this descriptor; return it."""
    _private.add(fd)
    return fd


def close_private(fd: int) -> None:
    """Close a descriptor that was kept private."""
    # In this order: the other way round, a fork in between would have the child close the number's next owner.
    _private.discard(fd)
    os.close(fd)


def _close_in_child() -> None:
    for fd in _private:
        with contextlib.suppress(OSError):
            os.close(fd)
    _private.clear()


os.register_at_fork(after_in_child=_close_in_child)


def to_scratch_error(error: OSError, doing: str, path: str | os.PathLike[str]) -> ScratchError:
    """Return the ScratchError for a system error: "cannot <doing> <path>", the cause, and the remedy."""
    place = os.fspath(path)
    kind: type[ScratchError] = ScratchError
    advice = ""
    if error.errno in _FULL:
        kind = DiskFullError
        advice = {
            errno.EDQUOT: "; raise the disk quota of this user, or choose another scratch root",
            errno.EFBIG: "; raise the limit on file sizes (ulimit -f)",
        }.get(error.errno or 0, "; free some space, or choose a scratch root on a larger disk")
    elif error.errno in _GONE:
        kind = ScratchDeletedError
        advice = "; it was deleted while in use; exclude scratch roots from cleanup tools"
    elif error.errno in _FORBIDDEN:
        kind = ScratchPermissionError
        advice = "; choose a scratch root that this user can write to"
    translated = kind(f"cannot {doing} {place}: {os.strerror(error.errno) if error.errno else error}{advice}")
    translated.errno = error.errno
    return translated
