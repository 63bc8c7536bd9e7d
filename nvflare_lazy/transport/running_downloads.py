# SPDX-License-Identifier: Apache-2.0
"""`RunningDownloads`: how much of each running download has been received, for displays of progress.

Downloads count their own bytes. This module only reads the counts, so that progress costs them nothing.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvflare_lazy.transport.receive import PayloadConsumer


class DownloadProgress(NamedTuple):
    """The progress of one download.

    Attributes:
        sender: The cell that has the payload.
        received: Bytes received so far.
        total: Bytes of the payload; None while they are unknown, as with senders without this package.
    """

    sender: str
    received: int
    total: int | None


class RunningDownloads:
    """The running downloads of a process; see `TransferRuntime.shared`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._downloads: set[PayloadConsumer] = set()

    @contextlib.contextmanager
    def running(self, download: PayloadConsumer) -> Iterator[None]:
        """List a download while the block runs."""
        with self._lock:
            self._downloads.add(download)
        try:
            yield
        finally:
            with self._lock:
                self._downloads.remove(download)

    def progress(self) -> list[DownloadProgress]:
        """Return the progress of each running download."""
        with self._lock:
            downloads = list(self._downloads)
        return [
            DownloadProgress(
                download.remote.from_fqcn,
                download.nbytes,
                None if download.manifest is None else download.manifest.nbytes,
            )
            for download in downloads
        ]
