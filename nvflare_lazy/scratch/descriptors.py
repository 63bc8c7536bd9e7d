# SPDX-License-Identifier: Apache-2.0
"""Descriptors that must not outlive their process in a forked child.

A child shares its parent's open files, locks included: a worker process that lives on would make the scratch of a
killed parent look alive, and keep the space of deleted files.
"""

from __future__ import annotations

import contextlib
import os

_private: set[int] = set()


def keep_private(fd: int) -> int:
    """Have forked children close this descriptor; return it."""
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
