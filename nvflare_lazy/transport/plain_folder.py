# SPDX-License-Identifier: Apache-2.0
"""A directory that a caller made and owns, as a place for received tensors: no lease, no quota, no guard.

For those who use the consumers by themselves, as they use NVFlare's own; a job's downloads go to leased scratch.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from nvflare_lazy.tensors.tensor_file import TensorFile


class PlainFolder:
    """The files of one download, in a directory that exists already.

    Args:
        path: The directory; `release()` removes it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._count = 0

    def new_file(self, suffix: str = ".safetensors") -> PlainFile:
        """Create a file in the directory."""
        self._count += 1
        return PlainFile(self.path / f"received-{self._count:05}{suffix}")

    def release(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.path, ignore_errors=True)


class PlainFile:
    """A new file, written at offsets.

    Args:
        path: Where; it must not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def pwrite(self, buffer: Any, offset: int) -> int:
        """Write all of a buffer at an offset."""
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], offset + done)
        return done

    def preallocate(self, nbytes: int) -> None:
        """Give the file its length."""
        os.truncate(self._fd, nbytes)

    def finish(self) -> TensorFile:
        """Close the file and return it open for reading."""
        self.close()
        return TensorFile(self.path)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
