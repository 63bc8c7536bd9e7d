# SPDX-License-Identifier: Apache-2.0
"""What the operating system's refusals mean for a download: disk full, directory gone, or not allowed."""

from __future__ import annotations

import errno
import os

from nvflare_lazy.errors import DiskFullError, ScratchDeletedError, ScratchError, ScratchPermissionError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_GONE = {errno.ENOENT, errno.ESTALE}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


def named(error: OSError, doing: str, path: str | os.PathLike[str]) -> ScratchError:
    """Return the named error for what the system answered.

    Args:
        error: The answer.
        doing: What was tried, as in "cannot <doing> <path>".
        path: What it was tried on.
    """
    place = os.fspath(path)
    kind: type[ScratchError] = ScratchError
    advice = ""
    if error.errno in _FULL:
        kind = DiskFullError
        advice = {
            errno.EDQUOT: "; raise the disk quota of this user, or choose another scratch root",
            errno.EFBIG: "; raise the limit on file sizes (ulimit -f)",
        }.get(error.errno or 0, "; make room there, or choose a scratch root on a larger disk")
    elif error.errno in _GONE:
        kind = ScratchDeletedError
        advice = "; it was deleted while in use; keep whatever cleans up there away from scratch roots"
    elif error.errno in _FORBIDDEN:
        kind = ScratchPermissionError
        advice = "; choose a scratch root that this user can write to"
    translated = kind(f"cannot {doing} {place}: {os.strerror(error.errno) if error.errno else error}{advice}")
    translated.errno = error.errno
    return translated
