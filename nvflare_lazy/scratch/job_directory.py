# SPDX-License-Identifier: Apache-2.0
"""A job's directory and the lease on it: made together, ended together, with the downloads in between.

`JobScratch` is what callers hold of it. This part has no reference to that handle, so that it ends with the handle.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from typing import TYPE_CHECKING

from nvflare_lazy.errors import ScratchReleasedError
from nvflare_lazy.scratch.account import Allotment
from nvflare_lazy.scratch.descriptors import close_private, keep_private
from nvflare_lazy.scratch.directory import DownloadDirectory
from nvflare_lazy.scratch.lease import Lease, try_lock
from nvflare_lazy.scratch.refusals import named
from nvflare_lazy.scratch.root import open_root
from nvflare_lazy.scratch.spare_files import SpareFiles
from nvflare_lazy.scratch.trees import make_private_directory, remove_tree

if TYPE_CHECKING:
    from pathlib import Path

    from nvflare_lazy.scratch.account import SpaceAccount

logger = logging.getLogger(__name__)


class JobDirectory:
    """A directory that is this process's until it is released or the process ends.

    Args:
        root: The scratch root.
        job: What the job is called.
        account: What its downloads may hold.
        preallocates: Whether setting disk space aside is cheap there.
        reuses: Whether files of downloads that are over are kept to be written over.
    """

    def __init__(self, root: Path, job: str, account: SpaceAccount, *, preallocates: bool, reuses: bool) -> None:
        self.released = False
        self._account = account
        self._preallocates = preallocates
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._downloads: dict[str, DownloadDirectory] = {}
        self._releaser = 0
        self._removed = threading.Event()
        self._root_fd = keep_private(open_root(root))
        try:
            self._lease = Lease(self._root_fd, os.fspath(root), job)
        except BaseException:
            close_private(self._root_fd)
            raise
        if not self._lease.locked:
            logger.warning(
                "%s is on a file system without locks: what a killed process leaves there is reclaimed only by the "
                "same host and container; a directory on a local disk is better",
                root,
            )
        self.path = root / self._lease.name
        try:
            self._fd = keep_private(make_private_directory(self._lease.name, dir_fd=self._root_fd))
            # A second proof of life, should somebody delete the lease file. It also tells systemd-tmpfiles, which
            # deletes what is old, to keep away.
            try_lock(self._fd)
            self._spares = SpareFiles(self._fd) if reuses else None
            account.spares = self._spares
        except BaseException as error:
            self._lease.give_back()
            close_private(self._root_fd)
            if isinstance(error, OSError):
                raise named(error, "make a directory for a job in", root) from error
            raise

    def download(self, label: str | None) -> DownloadDirectory:
        """Make a directory for one download."""
        name = secrets.token_hex(8)
        with self._lock:
            if self.released:
                raise ScratchReleasedError(f"{self.path} was released")
            directory = DownloadDirectory(
                self._fd,
                self.path,
                name,
                label=label,
                allotment=Allotment(self._account),
                preallocates=self._preallocates,
                spares=self._spares,
                gone=lambda gone: self._downloads.pop(gone, None),
            )
            self._downloads[name] = directory
        return directory

    def release(self, *, wait: bool = True) -> None:
        """Release all downloads, remove the directory, then give the lease back.

        Args:
            wait: Whether to wait for another thread that is doing so already.
        """
        if os.getpid() != self._pid:
            return
        me = threading.get_ident()
        with self._lock:
            first = not self.released
            if first:
                self.released = True
                self._releaser = me
        if first:
            self._remove()
        elif wait and self._releaser != me:
            self._removed.wait()

    def _remove(self) -> None:
        if self._spares is not None:
            self._spares.close()
        try:
            for directory in list(self._downloads.values()):
                directory.release()
            remove_tree(self._lease.name, dir_fd=self._root_fd)
        except OSError as error:
            logger.warning("cannot remove %s: %s; a later start will", self.path, error)
            self._lease.drop()
        else:
            self._lease.give_back()
        finally:
            with contextlib.suppress(OSError):
                close_private(self._fd)
                close_private(self._root_fd)
            self._removed.set()
