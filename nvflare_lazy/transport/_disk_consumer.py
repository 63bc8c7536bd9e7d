# SPDX-License-Identifier: Apache-2.0
"""Receives a payload into files, from which its tensors are read on use."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare_lazy.errors import TransferAbortedError
from nvflare_lazy.scratch import DownloadScratch
from nvflare_lazy.tensors.tensor_file import TemporaryPath, TensorFile
from nvflare_lazy.transport import _nvflare_private
from nvflare_lazy.transport._received_files import AppendingShards, PreallocatedShards, ReceiveDirectory
from nvflare_lazy.transport.receive import PayloadConsumer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nvflare_lazy.scratch.rendezvous import VisitedRendezvous
    from nvflare_lazy.tensors.tensor_file import FileSource
    from nvflare_lazy.transport._backends import ArrayBackend
    from nvflare_lazy.transport.handoff.wire import ShownFile
    from nvflare_lazy.transport.segments.manifest import Manifest, ManifestItem


class UnmanagedDirectory:
    """The files of one download, in a directory that the caller made and `release()` removes: without lease or quota.

    For callers that use the consumers on their own, as they use NVFlare's; a job's downloads go to leased scratch.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._count = 0

    def new_file(self, suffix: str = ".safetensors") -> UnmanagedFile:
        """Create a file in the directory."""
        self._count += 1
        return UnmanagedFile(self.path / f"received-{self._count:05}{suffix}")

    def release(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.path, ignore_errors=True)


class UnmanagedFile:
    """A new file, written at offsets."""

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

    def release_tail(self, end: int) -> None:
        """Do nothing: holes take no space."""

    def finish(self) -> TensorFile:
        """Close the file and return it open for reading."""
        self.close()
        return TensorFile(self.path)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class DiskConsumer(PayloadConsumer):
    """Writes what it receives into few, valid safetensors files.

    They are in a leased directory of the job's scratch, or in one that the caller made.

    Attributes:
        directory: The directory.
        owner: Removes it with the last reference; a directory that the caller made has an owner after `values()`.
        workflow_roots: NVFlare's directories for workflows; the download ends when NVFlare removes one of them.
    """

    place = "on disk"

    def __init__(
        self,
        backend: ArrayBackend,
        place: ReceiveDirectory | str | os.PathLike[str],
        workflow_roots: Iterable[str] = (),
    ) -> None:
        super().__init__(backend)
        self.directory: ReceiveDirectory = UnmanagedDirectory(place) if isinstance(place, (str, os.PathLike)) else place
        self.owner: object = self.directory
        self._lock = threading.Lock()
        self._shards: AppendingShards | PreallocatedShards | None = None
        self._received: dict[str, Any] = {}
        self._cleaned = False
        self.workflow_roots = set(workflow_roots)
        _nvflare_private.add_disk_download(self)

    def consume_items(self, items: list[Any], result: Any) -> Any:
        """Write items in NVFlare's form.

        Returns:
            For each name the file it is in and its name there. The files can be read at once.
        """
        if not isinstance(items, list):
            raise TypeError(f"items must be a list, got {type(items).__name__}")
        result = {} if result is None else result
        with self._lock:
            self._raise_if_cleaned()
            if not isinstance(self._shards, AppendingShards):
                self._shards = AppendingShards(self.backend, self.directory)
            for item in items:
                for name, dtype, shape, data in self.unpack(item):
                    self._shards.append(name, dtype, shape, data)
                    result[name] = self._shards.locations[name]
        return result

    def open_sink(self, manifest: Manifest) -> PreallocatedShards:
        """Write these values."""
        with self._lock:
            self._raise_if_cleaned()
            self._shards = PreallocatedShards(manifest, self.backend, self.directory)
            return self._shards

    def abandon_sink(self) -> None:
        """Release the space of the files; they go with the directory."""
        with self._lock:
            if isinstance(self._shards, PreallocatedShards):
                self._shards.release_rest(0)
                self._shards.close()
                self._shards = None

    @property
    def takes_files(self) -> bool:
        """Whether the directory is one of the job's scratch, which can own links."""
        return isinstance(self.directory, DownloadScratch)

    def open_shown(self, visited: VisitedRendezvous, shown: ShownFile) -> TensorFile:
        """Take a link to a file, in the directory."""
        assert isinstance(self.directory, DownloadScratch)
        return self.directory.take_link(visited, shown.id, shown.nbytes)

    def drop_shown(self, file: TensorFile) -> None:
        """Remove the link."""
        assert isinstance(self.directory, DownloadScratch)
        self.directory.drop_link(file)

    def take_sources(self, manifest: Manifest, source_of: Callable[[ManifestItem], FileSource]) -> None:
        """Make lazy values of the files."""
        with self._lock:
            self._raise_if_cleaned()
            self._received = {
                item.name: self.backend.lazy(source_of(item), item.dtype, item.shape) for item in manifest.items
            }

    def finish(self) -> None:
        """Complete the files."""
        with self._lock:
            self._finish_files()

    def _raise_if_cleaned(self) -> None:
        if self._cleaned:
            raise TransferAbortedError(f"the download from {self._sender} was cancelled")

    def _finish_files(self) -> None:
        if self._shards is not None:
            self._received = self._shards.finish()
            if isinstance(self._shards, PreallocatedShards):
                self.result = self._shards.locations
            self._shards = None
        self.result = {} if self.result is None else self.result

    def release(self) -> None:
        """Complete the files for their readers; `cleanup()` then does nothing."""
        with self._lock:
            if self._cleaned and self.failure is not None:
                raise self.failure
            if not self._cleaned:
                self._finish_files()
                self._cleaned = True
        _nvflare_private.remove_disk_download(self)

    def values(self) -> dict[str, Any]:
        """Complete the files and return the lazy values by name; they own the directory.

        The files of a leased directory own it from the beginning.
        """
        self.release()
        if isinstance(self.directory, UnmanagedDirectory):
            self.owner = TemporaryPath(self.directory.path)
            for file in {value.source.file() for value in self._received.values()}:
                file.own(self.owner)
        return self._received

    def discard(self) -> None:
        """Remove the data received so far."""
        self.cleanup()

    def cleanup(self) -> None:
        """Cancel the download and remove its directory; nothing is written afterwards."""
        self.cancel("the download was cleaned up")
        with self._lock:
            if self._cleaned:
                return
            self._cleaned = True
            shards, self._shards = self._shards, None
            self._received = {}
        _nvflare_private.remove_disk_download(self)
        # First the directory: it rejects writes that are in progress.
        self.directory.release()
        if shards is not None:
            shards.close()

    def download_failed(self, ref_id: str, reason: str) -> None:
        """Discard the part that has arrived; NVFlare's cleanup calls it during a download, with another reference."""
        if self._remote is None or ref_id != self._remote.ref_id:
            self.cancel(reason)
        super().download_failed(ref_id, reason)

    def is_under_root(self, root_dir: str | os.PathLike[str]) -> bool:
        """Whether the download belongs to a workflow's directory: the files are below it, or would be in NVFlare."""
        if os.fspath(root_dir) in self.workflow_roots:
            return True
        path = getattr(self.directory, "path", None)
        return path is not None and Path(root_dir).resolve() in [Path(path).resolve(), *Path(path).resolve().parents]
