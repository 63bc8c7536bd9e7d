# SPDX-License-Identifier: Apache-2.0
"""`Layout`: the files that contain a payload's bytes: files of this package as they are, and one copy of all else.

A file goes as it is only if the payload covers everything but its header: a filter may have dropped a tensor of it, and
the receiver would get that tensor too. Other bytes are copied or written to scratch once, for all receivers, on a
thread of their own.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from nvflare_lazy._text import format_size, get_logger
from nvflare_lazy.errors import NVFlareLazyError, ScratchError, ScratchReleasedError
from nvflare_lazy.formats.safetensors.header import PREFIX_BYTES
from nvflare_lazy.scratch.rendezvous import copy_ranges, is_ours
from nvflare_lazy.transport._received_files import PreallocatedShards
from nvflare_lazy.transport.handoff.wire import MAX_RUNS, Files, Run, ShownFile
from nvflare_lazy.transport.segments.manifest import Manifest, ManifestItem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nvflare_lazy.scratch import DownloadScratch, JobScratch
    from nvflare_lazy.scratch.file import ScratchFile
    from nvflare_lazy.scratch.rendezvous import Rendezvous
    from nvflare_lazy.tensors.tensor_file import TensorFile
    from nvflare_lazy.transport._downloadable import Payload
    from nvflare_lazy.transport.offload import DefaultScratch

    # Where tensors are, by their offset in the payload: in an open file, or in one of the files of the layout.
    _Found = dict[int, tuple[TensorFile, int] | None]
    _Places = dict[int, tuple[int, int]]

logger = get_logger(__name__)

# Bytes that are written at a time; small tensors are gathered in between.
_PIECE_BYTES = 4 << 20
_GATHERED_BYTES = 1 << 20
# Bytes that are copied between two looks at whether anybody still needs them.
_COPIED_BYTES = 64 << 20


class Layout:
    """The files of one payload, laid out by a thread from the beginning; `release` takes them back, in any state.

    The thread refers to the payload, and nothing else does: the files are taken back when the payload is dropped.

    Args:
        payload: The payload.
        scratch: The job scratch that bytes which are not in files of this package are written to.
        rendezvous: The directory through which the files are shown.
    """

    def __init__(self, payload: Payload, scratch: JobScratch | DefaultScratch, rendezvous: Rendezvous) -> None:
        self._scratch = scratch
        self._rendezvous = rendezvous
        self._lock = threading.RLock()
        self._finished = threading.Event()
        self._released = False
        self._ids: list[str] = []
        self._copy: DownloadScratch | None = None
        #: Bytes of the payload that are in files.
        self.done = 0
        #: The result: None until `wait` returns true, and if the payload cannot be handed over.
        self.files: Files | None = None
        self._finalizer = weakref.finalize(payload, self.release)
        self._finalizer.atexit = False
        threading.Thread(target=self._run, args=(payload,), name="nvflare_lazy_handoff", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait until the payload is laid out, or cannot be; false if that takes longer."""
        return self._finished.wait(seconds)

    def release(self) -> None:
        """Take the files back; a copy that is being written is stopped. May be called more than once."""
        with self._lock:
            self._released = True
            ids, self._ids = self._ids, []
            copy, self._copy = self._copy, None
        self._rendezvous.take_back(ids)
        if copy is not None:
            copy.release()

    def _run(self, payload: Payload) -> None:
        try:
            self.files = self._lay_out(payload)
        except (NVFlareLazyError, OSError) as error:
            if self._released:
                logger.debug("stopped a handoff: the payload was released")
            else:
                logger.info("Sending %s in segments, not by handoff: %s", format_size(payload.manifest.nbytes), error)
        finally:
            if self.files is None:
                self.release()
            self._finished.set()

    def _lay_out(self, payload: Payload) -> Files:
        items = [item for item in payload.manifest.stored() if item.nbytes]
        found = {item.offset: payload.place_of(item.name) for item in items}
        shown, places = self._show_complete_files(items, found)
        if _count_runs(items, places) > MAX_RUNS:
            self._take_back()
            shown, places = [], {}
        rest = [item for item in items if item.offset not in places]
        self.done = payload.manifest.nbytes - sum(item.nbytes for item in rest)
        if rest:
            written, new_places = self._write(rest, found, payload)
            places.update((offset, (len(shown) + index, at)) for offset, (index, at) in new_places.items())
            shown.extend(map(self._show, written))
        return Files(tuple(shown), tuple(_runs(items, places)))

    def _show_complete_files(self, items: list[ManifestItem], found: _Found) -> tuple[list[ShownFile], _Places]:
        """Show each file of this package that the payload covers, and return the places of the tensors in them."""
        by_file: dict[TensorFile, list[tuple[ManifestItem, int]]] = {}
        for item in items:
            place = found[item.offset]
            if place is not None:
                by_file.setdefault(place[0], []).append((item, place[1]))
        shown: list[ShownFile] = []
        places: _Places = {}
        for file, inside in by_file.items():
            if not is_ours(file) or not _covers(file, [(at, at + item.nbytes) for item, at in inside]):
                continue
            try:
                shown.append(self._show(file))
            except ScratchReleasedError:
                raise
            except ScratchError as error:  # on another file system, or with too many links
                logger.debug("copying %s: %s", file.path, error)
            else:
                places.update((item.offset, (len(shown) - 1, at)) for item, at in inside)
        return shown, places

    def _write(self, items: list[ManifestItem], found: _Found, payload: Payload) -> tuple[list[TensorFile], _Places]:
        """Copy these tensors to new files: in the kernel where they are in a file, and return their places."""
        dense = _without_gaps(items)
        with self._lock:
            self._raise_if_released()
            directory = self._copy = self._scratch.download("handoff")
        shards = PreallocatedShards(dense, payload.backend, directory)
        try:
            offsets = {item.offset: new.offset for item, new in zip(items, dense.items, strict=True)}
            places = {offset: shards.place(new) for offset, new in offsets.items()}
            for file, start, nbytes, index, at in _copies(items, found, places):
                with file.descriptor() as fd:
                    copy_ranges(fd, self._counted(start, nbytes, at), cast("ScratchFile", shards.files[index]))
            for item, start, nbytes in _pieces(item for item in items if found[item.offset] is None):
                shards.write(offsets[item.offset] + start - item.offset, memoryview(payload.read(start, nbytes)))
                self.done += nbytes
            return shards.finish_files(), places
        finally:
            shards.close()

    def _counted(self, start: int, nbytes: int, at: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of a range, and count each when it was copied."""
        for done in range(0, nbytes, _COPIED_BYTES):
            part = min(_COPIED_BYTES, nbytes - done)
            yield start + done, part, at + done
            self.done += part

    def _show(self, file: TensorFile) -> ShownFile:
        with self._lock, file.descriptor() as fd:
            self._raise_if_released()
            name = self._rendezvous.show(fd)
            self._ids.append(name)
        return ShownFile(name, file.size)

    def _take_back(self) -> None:
        with self._lock:
            ids, self._ids = self._ids, []
        self._rendezvous.take_back(ids)

    def _raise_if_released(self) -> None:
        if self._released:
            raise ScratchReleasedError("the payload was released")


def _without_gaps(items: list[ManifestItem]) -> Manifest:
    new: list[ManifestItem] = []
    end = 0
    for item in items:
        new.append(replace(item, offset=end))
        end += item.nbytes
    return Manifest(tuple(new), end)


def _covers(file: TensorFile, ranges: list[tuple[int, int]]) -> bool:
    """Whether ranges are all bytes of a safetensors file but those of its header."""
    start = bytearray(PREFIX_BYTES + 1)
    if file.size < len(start):
        return False
    file.read_into(memoryview(start), 0)
    end = PREFIX_BYTES + int.from_bytes(start[:PREFIX_BYTES], "little")
    if end > file.size or start[PREFIX_BYTES:] != b"{":
        return False
    for begin, stop in sorted(ranges):
        if begin > end:
            return False
        end = max(end, stop)
    return end >= file.size


def _runs(items: list[ManifestItem], places: _Places) -> Iterator[Run]:
    """Yield the payload's bytes in as few runs as possible."""
    run: Run | None = None
    for item in items:
        file, at = places[item.offset]
        if run is not None and run.file == file and run.at + run.nbytes == at:
            run = run._replace(nbytes=run.nbytes + item.nbytes)
            continue
        if run is not None:
            yield run
        run = Run(item.offset, item.nbytes, file, at)
    if run is not None:
        yield run


def _count_runs(items: list[ManifestItem], places: _Places) -> int:
    """Return the number of runs if all tensors without a place are written to one file."""
    end = 0
    known: _Places = {}
    for item in items:
        known[item.offset] = places.get(item.offset, (-1, end))
        if item.offset not in places:
            end += item.nbytes
    return sum(1 for _ in _runs(items, known))


def _copies(
    items: list[ManifestItem], found: _Found, places: _Places
) -> Iterator[tuple[TensorFile, int, int, int, int]]:
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
