# SPDX-License-Identifier: Apache-2.0
"""Directory operations relative to descriptors, descriptors closed in forked processes, and system errors.

No function follows a link or looks a path up twice. All of scratch uses them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from typing import TYPE_CHECKING

from nvflare_lazy.errors import DiskFullError, ScratchDeletedError, ScratchError, ScratchPermissionError

if TYPE_CHECKING:
    from collections.abc import Iterator

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Another thread may still be adding entries.
_MAX_PASSES = 4
# The files of a download are on the second level.
_MAX_COUNTED_DEPTH = 16
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


@contextlib.contextmanager
def opened_directory(name: str, *, dir_fd: int) -> Iterator[int]:
    """Open a directory itself for the time of a block."""
    fd = open_directory(name, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def make_private_directory(name: str, *, dir_fd: int) -> int:
    """Create a directory for this user only, whatever the umask; return it open."""
    os.mkdir(name, 0o700, dir_fd=dir_fd)
    # By name: after a strange umask it cannot be opened before that. The parent is ours alone. This also clears an
    # inherited set-group-ID bit.
    os.chmod(name, 0o700, dir_fd=dir_fd)
    return os.open(name, _OPEN_DIRECTORY, dir_fd=dir_fd)


def remove_tree(name: str, *, dir_fd: int) -> None:
    """Remove a directory and everything in it, of any depth and any number of entries.

    Missing entries are ignored, so any number of processes may remove the same tree at the same time. An entry that
    cannot be removed does not keep the others, and a mounted file system is such an entry.
    """
    for _ in range(_MAX_PASSES):
        try:
            with opened_directory(name, dir_fd=dir_fd) as top:
                _check_mount(name, top, dir_fd)
                _remove_entries(top)
        except FileNotFoundError:
            return
        except PermissionError:
            # Its creator may have ended before it set the mode; then it is empty.
            if not _remove_empty(name, dir_fd):
                raise
            return
        if _remove_empty(name, dir_fd):
            return
    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), name)


def tree_size(name: str, *, dir_fd: int) -> int:
    """Return how many bytes removing a directory would free; files that are removed during the count are not counted.

    A file with a name elsewhere is not counted, because another process keeps it. Mounted file systems are not counted,
    and neither are directories deeper than this package makes them.
    """
    linked: dict[tuple[int, int], tuple[int, os.stat_result]] = {}
    size = _count_bytes(name, dir_fd, _MAX_COUNTED_DEPTH, linked)
    return size + sum(status.st_size for count, status in linked.values() if count == status.st_nlink)


def _count_bytes(name: str, dir_fd: int, depth: int, linked: dict[tuple[int, int], tuple[int, os.stat_result]]) -> int:
    """Return the size of the files with one name below a directory, and count the names of each other file."""
    size = 0
    with contextlib.suppress(OSError), opened_directory(name, dir_fd=dir_fd) as fd, os.scandir(fd) as entries:
        _check_mount(name, fd, dir_fd)
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    size += _count_bytes(entry.name, fd, depth - 1, linked) if depth else 0
                    continue
                status = entry.stat(follow_symlinks=False)
                if status.st_nlink == 1:
                    size += status.st_size
                else:
                    key = status.st_dev, status.st_ino
                    linked[key] = linked.get(key, (0, status))[0] + 1, status
    return size


def _remove_entries(top: int) -> None:
    """Remove everything in an open directory.

    A directory in a directory is moved to the top before its entries are removed. So there is neither a recursion nor
    a long path, and two directories are open at a time.
    """
    failure: OSError | None = None
    moved = True
    while moved:
        moved, failure = False, None
        with os.scandir(top) as entries:
            for entry in entries:
                try:
                    if not _remove_entry(entry, top):
                        moved |= _move_directories(entry.name, top)
                        os.rmdir(entry.name, dir_fd=top)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    failure = error
    if failure is not None:
        raise failure


def _move_directories(name: str, top: int) -> bool:
    """Remove all entries of a directory but directories that are not empty, which are moved to `top`; False if none."""
    moved = False
    with opened_directory(name, dir_fd=top) as fd, os.scandir(fd) as entries:
        _check_mount(name, fd, top)
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if not _remove_entry(entry, fd):
                    os.rename(entry.name, secrets.token_hex(8), src_dir_fd=fd, dst_dir_fd=top)
                    moved = True
    return moved


def _remove_entry(entry: os.DirEntry[str], dir_fd: int) -> bool:
    """Remove an entry of a directory; False if it is a directory that is not empty."""
    if entry.is_dir(follow_symlinks=False):
        return _remove_empty(entry.name, dir_fd)
    os.unlink(entry.name, dir_fd=dir_fd)
    return True


def _remove_empty(name: str, dir_fd: int) -> bool:
    """Remove a directory if it is empty; False if it is not."""
    try:
        os.rmdir(name, dir_fd=dir_fd)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _check_mount(name: str, fd: int, dir_fd: int) -> None:
    """Raise OSError if another file system, or another part of the same one, is mounted on a directory."""
    if _mount_id(fd) != _mount_id(dir_fd):
        raise OSError(errno.EBUSY, "a file system is mounted there", name)


def _mount_id(fd: int) -> str | int:
    """Return which mount an open directory is in, as the kernel numbers them, else the device."""
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{fd}") as lines:
        return next((line for line in lines if line.startswith("mnt_id:")), os.fstat(fd).st_dev)
    return os.fstat(fd).st_dev


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
