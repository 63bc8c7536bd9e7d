# SPDX-License-Identifier: Apache-2.0
"""Copies of tensors for handoffs: those in memory, and those in files that other programs may change.

A copy is one download in the sender's scratch, with valid safetensors files. Payloads of the same tensors of the same
open files share a copy: a server's task for each client is a separate payload.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from nvflare_lazy.errors import ScratchError
from nvflare_lazy.scratch.rendezvous import copy_ranges, is_ours
from nvflare_lazy.transport._received_files import PreallocatedShards
from nvflare_lazy.transport.segments.manifest import Manifest, ManifestItem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nvflare_lazy.scratch import DownloadScratch, JobScratch
    from nvflare_lazy.scratch.file import ScratchFile
    from nvflare_lazy.tensors.tensor_file import TensorFile
    from nvflare_lazy.transport._downloadable import Payload
    from nvflare_lazy.transport.offload import DefaultScratch

    # Where tensors are, by their offset in the payload: in an open file, or in one of several files.
    Found = dict[int, tuple[TensorFile, int] | None]
    Places = dict[int, tuple[int, int]]
    _Key = tuple[tuple[weakref.ref[TensorFile], int, int], ...]

# Bytes that are written at a time; small tensors are gathered in between.
_PIECE_BYTES = 4 << 20
_GATHERED_BYTES = 1 << 20
# Bytes that are copied by the kernel before they count as done.
_COPIED_BYTES = 64 << 20


class Copies:
    """The copies of a process. One that is only of files is kept until its source is closed, or another replaces it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._of_files: weakref.WeakKeyDictionary[TensorFile, tuple[_Key, Copy]] = weakref.WeakKeyDictionary()

    def use(
        self, user: object, items: list[ManifestItem], found: Found, scratch: JobScratch | DefaultScratch
    ) -> tuple[Copy, bool]:
        """Return a copy of these tensors, and whether it is new: then the caller writes it."""
        places = [found[item.offset] for item in items]
        files = [place for place in places if place is not None]
        with self._lock:
            if len(files) < len(places):
                return Copy(scratch.download("handoff"), user), True
            key = tuple((weakref.ref(file), at, item.nbytes) for (file, at), item in zip(files, items, strict=True))
            source = files[0][0]
            known_key, copy = self._of_files.get(source, (None, None))
            if copy is None or known_key != key or not (copy.users or copy.is_complete):
                copy = Copy(scratch.download("handoff"), user)
                self._of_files[source] = key, copy
                return copy, True
            copy.users.add(user)
            return copy, False

    def leave(self, copy: Copy, user: object) -> None:
        """End the use of a copy: without users, one that is incomplete, or of tensors in memory, is removed."""
        with self._lock:
            copy.users.discard(user)
            sources = [source for source, (_, kept) in self._of_files.items() if kept is copy]
            if copy.users or (sources and copy.is_complete):
                return
            for source in sources:
                del self._of_files[source]
        copy.release()


class Copy:
    """New files for tensors that are not in files of this package.

    Attributes:
        users: The layouts that use it.
        done: Bytes that have been written.
        files: The files, when they are complete.
        places: The places of the tensors in them.
    """

    def __init__(self, directory: DownloadScratch, user: object) -> None:
        self.users = {user}
        self.done = 0
        self.files: list[TensorFile] = []
        self.places: Places = {}
        self._directory = directory
        self._finished = threading.Event()

    @property
    def is_complete(self) -> bool:
        """Whether it has been written, and not been removed."""
        return bool(self.files) and all(map(is_ours, self.files))

    def wait(self, seconds: float) -> bool:
        """Wait until it is complete; false if that takes longer.

        Raises:
            ScratchError: If it could not be written.
        """
        if not self._finished.wait(seconds):
            return False
        if not self.files:
            raise ScratchError("the copy of the tensors was not written")
        return True

    def release(self) -> None:
        """Stop writing, and remove the files; closed ones, since open ones are not written over later."""
        for file in self.files:
            file.close()
        self._directory.release()

    def write(self, items: list[ManifestItem], found: Found, payload: Payload) -> None:
        """Copy these tensors: in the kernel where they are in a file, else through memory."""
        dense = _without_gaps(items)
        shards = None
        try:
            first = found[items[0].offset]
            shards = PreallocatedShards(dense, payload.backend, self._directory, None if first is None else first[1])
            offsets = {item.offset: new.offset for item, new in zip(items, dense.items, strict=True)}
            self.places = {offset: shards.place(new) for offset, new in offsets.items()}
            for file, start, nbytes, index, at in _copies(items, found, self.places):
                with file.descriptor() as fd:
                    copy_ranges(fd, self._counted(start, nbytes, at), cast("ScratchFile", shards.files[index]))
            for item, start, nbytes in _pieces(item for item in items if found[item.offset] is None):
                shards.write(offsets[item.offset] + start - item.offset, memoryview(payload.read(start, nbytes)))
                self.done += nbytes
            self.files = shards.finish_files()
        finally:
            if shards is not None:
                shards.close()
            self._finished.set()

    def _counted(self, start: int, nbytes: int, at: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of a range, and count each when it was copied."""
        for done in range(0, nbytes, _COPIED_BYTES):
            part = min(_COPIED_BYTES, nbytes - done)
            yield start + done, part, at + done
            self.done += part


def _without_gaps(items: list[ManifestItem]) -> Manifest:
    new: list[ManifestItem] = []
    end = 0
    for item in items:
        new.append(replace(item, offset=end))
        end += item.nbytes
    return Manifest(tuple(new), end)


def _copies(items: list[ManifestItem], found: Found, places: Places) -> Iterator[tuple[TensorFile, int, int, int, int]]:
    """Yield the ranges that are in files: the file, start and size there, and the place in the new files."""
    copy: tuple[TensorFile, int, int, int, int] | None = None
    for item in items:
        place = found[item.offset]
        if place is None:
            continue
        index, at = places[item.offset]
        if copy is not None:
            file, start, nbytes, copy_index, copy_at = copy
            if (file, start + nbytes, copy_index, copy_at + nbytes) == (*place, index, at):
                copy = file, start, nbytes + item.nbytes, index, copy_at
                continue
            yield copy
        copy = *place, item.nbytes, index, at
    if copy is not None:
        yield copy


def _pieces(items: Iterable[ManifestItem]) -> Iterator[tuple[ManifestItem, int, int]]:
    """Yield ranges of the payload to write: parts of a large tensor, or several small ones after one another.

    Each range comes with the tensor that it starts in.
    """
    first: ManifestItem | None = None
    end = 0
    for item in items:
        if first is not None and (item.offset != end or end + item.nbytes - first.offset > _GATHERED_BYTES):
            yield first, first.offset, end - first.offset
            first = None
        end = item.offset + item.nbytes
        if item.nbytes > _GATHERED_BYTES:
            for start in range(item.offset, end, _PIECE_BYTES):
                yield item, start, min(_PIECE_BYTES, end - start)
        elif first is None:
            first = item
    if first is not None:
        yield first, first.offset, end - first.offset
