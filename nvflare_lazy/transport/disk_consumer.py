# SPDX-License-Identifier: Apache-2.0
"""Receives a payload into files, from which its tensors are read on use."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare_lazy.errors import TransferAbortedError
from nvflare_lazy.tensors.tensor_file import TemporaryPath
from nvflare_lazy.transport import offload
from nvflare_lazy.transport.nvflare_items.format import unpack_item
from nvflare_lazy.transport.plain_folder import PlainFolder
from nvflare_lazy.transport.receive import PayloadConsumer
from nvflare_lazy.transport.shards import AppendingShards, Folder, PreallocatedShards, ReceivedTensor

if TYPE_CHECKING:
    from nvflare_lazy.transport._backends import Family
    from nvflare_lazy.transport.segments.manifest import Manifest


class DiskConsumer(PayloadConsumer):
    """Writes what it receives into few, valid safetensors files.

    Args:
        family: What kind of values.
        place: A leased directory of the job's scratch, or the path of a directory that the caller made.
    """

    def __init__(self, family: Family, place: Folder | str | os.PathLike[str]) -> None:
        super().__init__(family)
        self.folder: Folder = PlainFolder(place) if isinstance(place, (str, os.PathLike)) else place
        self._lock = threading.Lock()
        self._shards: AppendingShards | PreallocatedShards | None = None
        self._received: dict[str, ReceivedTensor] = {}
        self._cleaned = False
        self._downloads = offload.runtime.downloads
        self._downloads.add(self)

    def consume_items(self, items: list[Any], result: Any) -> Any:
        """Write items in NVFlare's form.

        Returns:
            For each name the file it is in and its name there. The files are complete after `release()`.
        """
        if not isinstance(items, list):
            raise TypeError(f"items must be a list, not a {type(items).__name__}")
        result = {} if result is None else result
        with self._lock:
            if self._cleaned:
                raise TransferAbortedError(f"the download from {self._peer} was called off")
            if self._shards is None:
                self._shards = AppendingShards(self.family, self.folder)
            assert isinstance(self._shards, AppendingShards)
            for item in items:
                for name, dtype, shape, data in unpack_item(self.family, item, self._peer):
                    self._shards.append(name, dtype, shape, data)
                    result[name] = self._shards.locations[name]
        return result

    def open_sink(self, manifest: Manifest) -> PreallocatedShards:
        """Write these values."""
        with self._lock:
            if self._cleaned:
                raise TransferAbortedError(f"the download from {self._peer} was called off")
            self._shards = PreallocatedShards(manifest, self.family, self.folder)
            return self._shards

    def finish(self) -> None:
        """Complete the files."""
        with self._lock:
            self._finish_files()

    def _finish_files(self) -> None:
        if self._shards is not None:
            self._received = self._shards.finish()
            if isinstance(self._shards, PreallocatedShards):
                self.result = self._shards.locations
            self._shards = None
        self.result = {} if self.result is None else self.result

    def release(self) -> None:
        """Complete the files and leave them to whoever reads them; `cleanup()` does nothing from now on."""
        with self._lock:
            if self._cleaned and self.failure is not None:
                raise self.failure
            if not self._cleaned:
                self._finish_files()
                self._cleaned = True
        self._downloads.discard(self)

    @property
    def received(self) -> dict[str, ReceivedTensor]:
        """The tensors or arrays by name, once the files are complete."""
        return self._received

    def owner(self) -> object:
        """Return what removes the directory with its last reference; the tensors have to keep it alive."""
        return TemporaryPath(self.folder.path) if isinstance(self.folder, PlainFolder) else self.folder

    def discard(self) -> None:
        """Remove what has come so far."""
        self.cleanup()

    def cleanup(self) -> None:
        """Call the download off and remove its directory; afterwards nothing is written any more."""
        self.cancel("the download was cleaned up")
        with self._lock:
            if self._cleaned:
                return
            self._cleaned = True
            shards, self._shards = self._shards, None
            self._received = {}
        self._downloads.discard(self)
        # First the directory: it turns away writers that are under way.
        self.folder.release()
        if shards is not None:
            shards.close()

    def is_under(self, root: str | os.PathLike[str]) -> bool:
        """Whether the files are below a directory."""
        path = getattr(self.folder, "path", None)
        return path is not None and Path(root).resolve() in [Path(path).resolve(), *Path(path).resolve().parents]


def cleanup_active_disk_tensor_downloads(
    reason: str = "download aborted", root_dir: str | os.PathLike[str] | None = None
) -> None:
    """Call off all downloads to disk that are under way in this process, and remove their directories.

    Args:
        reason: Why; becomes part of the error that they end with.
        root_dir: Only those below this directory.
    """
    for consumer in offload.runtime.downloads.active():
        if root_dir is None or consumer.is_under(root_dir):
            consumer.cancel(reason)
            consumer.download_failed("active_disk_tensor_download", reason)
