# SPDX-License-Identifier: Apache-2.0
"""The scratch root: an argument, an environment variable or a per-user directory, checked before its first use.

Everything below the root is reached through a descriptor of it, under generated names. So only the root itself has to
be checked: it must belong to this user alone.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from pathlib import Path

from nvflare_lazy._text import get_logger
from nvflare_lazy.errors import ScratchError, ScratchPermissionError
from nvflare_lazy.scratch._system import open_directory, to_scratch_error

logger = get_logger(__name__)

_ENVIRONMENT_VARIABLE = "NVFLARE_LAZY_SCRATCH"
_MAX_LINKS = 40
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def resolve_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Return the scratch root to use, created for this user alone if it is missing, and checked.

    A directory that several users share, such as /tmp or a project's, is not used itself: scratch is in a directory
    of this user in it.

    Args:
        root: The directory that the user chose. Default: `NVFLARE_LAZY_SCRATCH`, else the user's cache directory,
            else, without a writable home, the temporary directory.

    Raises:
        ScratchPermissionError: If other users could replace it, or this user may not write there.
    """
    path, is_chosen = _locate(root)
    try:
        return _create_checked(path)
    except ScratchError as error:
        if is_chosen:
            raise
        logger.info("Cannot use the cache directory for scratch (%s); using the temporary directory", error)
    return _create_checked(_temporary_root())


def set_default_root(root: str | None) -> str | None:
    """Make a root the default of this process and its child processes; None selects the user's directories.

    Returns:
        The previous one, to be restored.
    """
    before = os.environ.pop(_ENVIRONMENT_VARIABLE, None)
    if root is not None:
        os.environ[_ENVIRONMENT_VARIABLE] = root
    return before


def find_root(root: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the directory that `resolve_root` would use, or None if it does not exist; create nothing."""
    path, is_chosen = _locate(root)
    for candidate in [path] if is_chosen else [path, _temporary_root()]:
        place = _choose_directory(_follow_links(candidate))
        if place.is_dir() and not _is_shared(place):
            return place
    return None


def open_root(path: Path) -> int:
    """Open a resolved root, and check again that it belongs to this user alone."""
    try:
        fd = open_directory(path)
    except OSError as error:
        raise to_scratch_error(error, "open the scratch root", path) from error
    if _is_shared_by(os.fstat(fd)):
        os.close(fd)
        raise ScratchPermissionError(f"the scratch root {path} was replaced by another user's directory")
    return fd


def _locate(root: str | os.PathLike[str] | None) -> tuple[Path, bool]:
    """Return the requested root, and whether it was chosen, by the argument or the environment."""
    chosen = root if root is not None else os.environ.get(_ENVIRONMENT_VARIABLE) or None
    return (_cache_root(), False) if chosen is None else (_to_absolute(chosen), True)


def _to_absolute(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(os.path.abspath(Path(path).expanduser()))
    except (OSError, RuntimeError) as error:  # the working directory was deleted, or the user does not have a home
        raise ScratchError(
            f"cannot resolve the scratch root {os.fspath(path)}: {error}; use an absolute path"
        ) from error


def _cache_root() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    home = Path(os.environ.get("HOME", ""))
    base = cache if cache.is_absolute() else home
    # After sudo, the home is still the caller's; in a container it may belong to no user.
    if not base.is_absolute() or not _is_owned(base):
        return _temporary_root()
    if base is home:
        cache = home / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.path.abspath(cache)) / "nvflare-lazy" / "scratch"


def _is_owned(directory: Path) -> bool:
    """Whether a directory, or the nearest one above it that exists, belongs to this user."""
    for place in (directory, *directory.parents):
        with contextlib.suppress(OSError):
            return place.stat().st_uid == os.geteuid()
    return False


def _temporary_root() -> Path:
    try:
        return _user_directory(_to_absolute(tempfile.gettempdir()))
    except FileNotFoundError as error:
        raise ScratchError(
            f"neither the cache nor the temporary directory is writable; set {_ENVIRONMENT_VARIABLE}"
        ) from error


def _user_directory(directory: Path) -> Path:
    """Return the path of this user's directory in a shared one."""
    return directory / f"nvflare-lazy-{os.geteuid()}"


def _create_checked(path: Path) -> Path:
    place = _follow_links(path)
    try:
        place = _choose_directory(place)
        _create_missing(place)
        _check(place)
    except ScratchError:
        raise
    except OSError as error:
        raise to_scratch_error(error, "use the scratch root", place) from error
    return place


def _is_shared(directory: Path) -> bool:
    return _is_shared_by(os.stat(directory, follow_symlinks=False))


def _is_shared_by(status: os.stat_result) -> bool:
    return status.st_uid != os.geteuid() or bool(status.st_mode & _WRITABLE_BY_OTHERS)


def _choose_directory(directory: Path) -> Path:
    """Return the directory itself if it is, or will be, this user's alone, else this user's directory in it."""
    if not directory.is_dir() or not _is_shared(directory):
        return directory
    mode = directory.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ScratchPermissionError(
            f"{directory} is world-writable without the sticky bit (mode {stat.S_IMODE(mode):04o}), so other users "
            f"could replace the scratch root; run chmod +t {directory}, or use a directory you own, such as "
            f"{_user_directory(directory)}"
        )
    return _user_directory(directory)


def _create_missing(place: Path) -> None:
    if not place.parent.exists():
        _create_missing(place.parent)
    with contextlib.suppress(FileExistsError):
        place.mkdir(0o700)
        # Whatever the umask was, and without an inherited set-group-ID bit.
        place.chmod(0o700)


def _check(place: Path) -> None:
    try:
        status = os.stat(place, follow_symlinks=False)
    except FileNotFoundError:
        raise ScratchError(f"the scratch root {place} was deleted right after it was created") from None
    if not stat.S_ISDIR(status.st_mode):
        raise ScratchError(f"the scratch root {place} is not a directory; remove it, or choose another root")
    if status.st_uid != os.geteuid():
        raise ScratchPermissionError(
            f"the scratch root {place} is owned by uid {status.st_uid}, but this process runs as uid {os.geteuid()}; "
            f"set {_ENVIRONMENT_VARIABLE} to a directory this user owns"
        )
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise ScratchPermissionError(
            f"other users may write to the scratch root {place} (mode {stat.S_IMODE(status.st_mode):04o}); run chmod "
            "700 on it, or choose another one"
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise ScratchPermissionError(f"the scratch root {place} is not writable; choose another one")
    for parent in place.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            logger.warning(
                "%s is world-writable without the sticky bit, so other users could replace the scratch root %s in it; "
                "run chmod +t, unless no other user has access",
                parent,
                place,
            )


def _follow_links(path: Path) -> Path:
    """Follow the links in a path, but none that another user may have planted.

    Like the kernel's fs.protected_symlinks, and also for directories: in a sticky, world-writable directory, only
    entries of root and of this user are trusted.
    """
    trusted = {0, os.geteuid()}
    place = Path("/")
    rest = list(reversed(path.parts[1:]))
    links = 0
    while rest:
        part = rest.pop()
        if part == "..":
            place = place.parent
            continue
        above, place = os.stat(place), place / part
        try:
            status = os.stat(place, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return place.joinpath(*reversed(rest))
        except OSError as error:
            raise to_scratch_error(error, "use the scratch root", path) from error
        is_public = above.st_mode & stat.S_ISVTX and above.st_mode & stat.S_IWOTH
        if is_public and status.st_uid not in trusted:
            raise ScratchPermissionError(
                f"{place}, part of the scratch root {path}, was created by uid {status.st_uid}; remove it, or choose "
                "another root"
            )
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MAX_LINKS:
                raise ScratchError(f"the scratch root {path} has too many links; choose another one")
            target = Path(os.readlink(place))
            rest.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))
            place = Path("/") if target.is_absolute() else place.parent
    return place
