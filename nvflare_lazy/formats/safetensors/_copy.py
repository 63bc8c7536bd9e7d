# SPDX-License-Identifier: Apache-2.0
"""Copies the bytes of a lazy tensor from its byte source to a file, one tile at a time.

A tile is read into a small buffer that stays in the processor's cache and is written from there, which is faster than
letting the kernel copy from file to file (see `benchmarks/copying.py`). If a file server can copy within itself, the
kernel's copy is faster.
"""

from __future__ import annotations

import errno
import os
from functools import lru_cache
from typing import TYPE_CHECKING

from nvflare_lazy._system import mounts

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvflare_lazy.formats.atomic_file import AtomicFile
    from nvflare_lazy.tensors.byte_source import ByteSource

#: Bytes of the buffer that bytes pass through.
TILE_BYTES = 2 << 20

# File systems whose server copies within itself, so that the bytes do not cross the network twice.
_SERVER_COPIES = frozenset(("ceph", "cifs", "nfs4", "smb3"))
# Answers of the kernel that mean "not with these two files": the bytes are copied here instead.
_NOT_SUPPORTED = frozenset((errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF))
_MAX_COPY_BYTES = 1 << 30


def copy_into(
    file: AtomicFile, offset: int, source: ByteSource, tile: memoryview, written: Callable[[int, int], None]
) -> None:
    """Copy all of a source to a file, starting at `offset`, in the kernel or through the buffer `tile`.

    `written` receives the begin and the end, in the source, of each copied range.
    """
    done = _copied_by_server(file, offset, source, written)
    while done < source.nbytes:
        # Up to the next multiple of a tile in the file: the page cache has larger pages for aligned writes.
        count = min(len(tile) - (offset + done) % len(tile), source.nbytes - done)
        source.read_into(tile[:count], done)
        file.write_at(tile[:count], offset + done)
        written(done, done + count)
        done += count


def _copied_by_server(file: AtomicFile, offset: int, source: ByteSource, written: Callable[[int, int], None]) -> int:
    """Have a file server copy as many bytes as it will, and return their number."""
    place = source.file_range()
    if place is None or not source.nbytes:
        return 0
    opened, start = place
    done = 0
    with opened.descriptor() as fd, file.descriptor() as target:
        device = os.fstat(fd).st_dev
        if device != os.fstat(target).st_dev or not _server_copies(device):
            return 0
        while done < source.nbytes:
            wanted = min(source.nbytes - done, _MAX_COPY_BYTES)
            try:
                count = os.copy_file_range(fd, target, wanted, start + done, offset + done)
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
                break
            if count == 0:
                break
            written(done, done + count)
            done += count
    return done


@lru_cache(maxsize=64)
def _server_copies(device: int) -> bool:
    number = f"{os.major(device)}:{os.minor(device)}"
    return any(mount.device == number and mount.kind in _SERVER_COPIES for mount in mounts())
