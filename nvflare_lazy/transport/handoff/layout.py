# SPDX-License-Identifier: Apache-2.0
"""`Layout`: the files that contain a payload's bytes: files of this package as they are, and one copy of all else.

A file goes as it is only if the payload covers everything but its header: a filter may have dropped a tensor of it, and
the receiver would get that tensor too. A separate thread copies all other bytes to scratch, once for all
receivers.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from nvflare_lazy._text import format_size, get_logger
from nvflare_lazy.errors import NVFlareLazyError, ScratchError, ScratchReleasedError
from nvflare_lazy.formats.safetensors.header import PREFIX_BYTES
from nvflare_lazy.scratch.rendezvous import is_ours
from nvflare_lazy.transport.handoff.wire import MAX_RUNS, Files, Run, ShownFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvflare_lazy.scratch import JobScratch
    from nvflare_lazy.scratch.rendezvous import Rendezvous
    from nvflare_lazy.tensors.tensor_file import TensorFile
    from nvflare_lazy.transport._downloadable import Payload
    from nvflare_lazy.transport.handoff.copies import Copies, Copy, Found, Places
    from nvflare_lazy.transport.offload import DefaultScratch
    from nvflare_lazy.transport.segments.manifest import ManifestItem

logger = get_logger(__name__)

_POLL_SECONDS = 0.1


class Layout:
    """The files of one payload, laid out by a thread from the beginning; `release` takes them back, in any state.

    The thread refers to the payload, and nothing else does: the files are taken back when the payload is dropped.

    Args:
        payload: The payload.
        scratch: The job scratch that bytes which are not in files of this package are written to.
        rendezvous: The directory through which the files are shown.
        copies: The copies of this process.
    """

    def __init__(
        self, payload: Payload, scratch: JobScratch | DefaultScratch, rendezvous: Rendezvous, copies: Copies
    ) -> None:
        self._copies = copies
        self._scratch = scratch
        self._rendezvous = rendezvous
        self._lock = threading.RLock()
        self._finished = threading.Event()
        self._released = False
        self._ids: list[str] = []
        self._copy: Copy | None = None
        self._known = 0  # bytes in files that existed
        #: The result: None until `wait` returns true, and if the payload cannot be handed over.
        self.files: Files | None = None
        self._finalizer = weakref.finalize(payload, self.release)
        self._finalizer.atexit = False
        threading.Thread(target=self._run, args=(payload,), name="nvflare_lazy_handoff", daemon=True).start()

    @property
    def done(self) -> int:
        """Bytes of the payload that are in files."""
        copy = self._copy
        return self._known + (0 if copy is None else copy.done)

    def wait(self, seconds: float) -> bool:
        """Wait until the payload is laid out, or cannot be; false if that takes longer."""
        return self._finished.wait(seconds)

    def release(self) -> None:
        """Take the files back; a copy that is being written is stopped. Repeated calls are allowed."""
        with self._lock:
            self._released = True
            ids, self._ids = self._ids, []
            copy, self._copy = self._copy, None
        self._rendezvous.take_back(ids)
        if copy is not None:
            self._copies.leave(copy, self)

    def _run(self, payload: Payload) -> None:
        try:
            self.files = self._lay_out(payload)
        except (NVFlareLazyError, OSError) as error:
            if self._released:
                logger.debug("Stopped a handoff: the payload was released")
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
        self._known = payload.manifest.nbytes - sum(item.nbytes for item in rest)
        if rest:
            written = self._copied(rest, found, payload)
            places.update((offset, (len(shown) + index, at)) for offset, (index, at) in written.places.items())
            shown.extend(map(self._show, written.files))
        return Files(tuple(shown), tuple(_runs(items, places)))

    def _show_complete_files(self, items: list[ManifestItem], found: Found) -> tuple[list[ShownFile], Places]:
        """Show each file of this package that the payload covers, and return the places of the tensors in them."""
        by_file: dict[TensorFile, list[tuple[ManifestItem, int]]] = {}
        for item in items:
            place = found[item.offset]
            if place is not None:
                by_file.setdefault(place[0], []).append((item, place[1]))
        shown: list[ShownFile] = []
        places: Places = {}
        for file, inside in by_file.items():
            if not is_ours(file) or not _covers(file, [(at, at + item.nbytes) for item, at in inside]):
                continue
            try:
                shown.append(self._show(file))
            except ScratchReleasedError:
                raise
            except ScratchError as error:  # on another file system, or with too many links
                logger.debug("Copying %s: %s", file.path, error)
            else:
                places.update((item.offset, (len(shown) - 1, at)) for item, at in inside)
        return shown, places

    def _copied(self, items: list[ManifestItem], found: Found, payload: Payload) -> Copy:
        """Return the complete copy of these tensors, which another layout may be writing."""
        with self._lock:
            self._raise_if_released()
            copy, is_new = self._copies.use(self, items, found, self._scratch)
            self._copy = copy
        if is_new:
            copy.write(items, found, payload)
        while not copy.wait(_POLL_SECONDS):
            self._raise_if_released()
        return copy

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


def _runs(items: list[ManifestItem], places: Places) -> Iterator[Run]:
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


def _count_runs(items: list[ManifestItem], places: Places) -> int:
    """Return the number of runs if all tensors without a place are written to one file."""
    end = 0
    known: Places = {}
    for item in items:
        known[item.offset] = places.get(item.offset, (-1, end))
        if item.offset not in places:
            end += item.nbytes
    return sum(1 for _ in _runs(items, known))
