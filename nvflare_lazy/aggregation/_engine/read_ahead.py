# SPDX-License-Identifier: Apache-2.0
"""Reading files before the threads of a pass need the bytes, so that the disk works while they compute.

A file that the page cache has is left to these threads. The others are read past the page cache: filling it took as
much processor time as a third of a comparison, and the bytes are needed only once.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from nvflare_lazy.errors import SourceReleasedError
from nvflare_lazy.tensors.tensor_memory import storage_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from typing_extensions import Self

    from nvflare_lazy.tensors.byte_source import ByteSource
    from nvflare_lazy.tensors.tensor_file import TensorFile

#: Bytes that a thread should need at once. With a quarter of it, the requests to a fast disk were too small.
STEP_BYTES = 8 << 20
#: Threads that read ahead: one did not keep a fast disk busy, and three read 16 files a little faster than two. Each
#: needs a buffer, as each thread of a pass does.
READERS = 3
# Ranges of a file that have gaps between them are read with the gaps, unless these are longer than the ranges.
_MAX_SPAN = 2
# Bytes of a file that are looked up; if the page cache has all of them, the file is not read ahead.
_SAMPLES = 16
# Reads past the page cache begin and end at multiples of it, in the file and in memory.
_ALIGNMENT = 4096
_LARGE_PAGE = 2 << 20


class FileRange(NamedTuple):
    """Some bytes that will be needed soon."""

    file: TensorFile
    offset: int
    nbytes: int

    @classmethod
    def of(cls, source: ByteSource, offset: int, nbytes: int) -> FileRange | None:
        """Return the place of some bytes of a source; None if they are not in a file."""
        place = source.file_range()
        return None if place is None else cls(place[0], place[1] + offset, nbytes)


@dataclass
class Loaded:
    """The bytes of a step that have been read ahead."""

    _spans: list[tuple[FileRange, torch.Tensor]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._spans)

    def find(self, wanted: FileRange | None) -> torch.Tensor | None:
        """Return bytes of a file; None if they have not been read, so that the caller must read them."""
        if wanted is None:
            return None
        for span, memory in self._spans:
            start = wanted.offset - span.offset
            if span.file is wanted.file and 0 <= start <= span.nbytes - wanted.nbytes:
                return memory[start : start + wanted.nbytes]
        return None


class ReadAhead:
    """Threads that read files while the block runs, a few steps ahead of the threads of a pass.

    Args:
        files: The files of all steps.
        steps: What the threads of the pass need, in the order of the numbers that they pass to `step`.
        threads: How many of them there are.
        step_bytes: Most bytes of a step that are read ahead.
    """

    def __init__(
        self,
        files: Iterable[TensorFile],
        steps: Iterable[list[FileRange]],
        threads: int,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        self._files = files
        self._steps = iter(enumerate(steps))
        self._buffers = threads + READERS
        self._step_bytes = step_bytes
        self._cold: set[TensorFile] = set()
        self._readers: list[threading.Thread] = []
        # The attributes below are used with the lock of `_change`.
        self._change = threading.Condition()
        self._free: deque[torch.Tensor] = deque()
        self._loaded: dict[int, tuple[Loaded, torch.Tensor]] = {}
        self._running = 0
        self._ended = False

    def __enter__(self) -> Self:
        for file in set(self._files):
            # The thread that needs the bytes gets the same error.
            with suppress(OSError, SourceReleasedError):
                if not _is_in_page_cache(file):
                    self._cold.add(file)
        if self._cold:
            # A span may begin and end within a page.
            nbytes = self._step_bytes + 2 * _ALIGNMENT * len(self._cold)
            self._free.extend(_large_pages(nbytes, self._buffers))
            self._running = READERS
            for number in range(READERS):
                self._readers.append(threading.Thread(target=self._run, name=f"read-ahead-{number}", daemon=True))
                self._readers[-1].start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._change:
            self._ended = True
            self._change.notify_all()
        for reader in self._readers:
            reader.join()

    @property
    def is_reading(self) -> bool:
        """Whether any file is read ahead."""
        return bool(self._readers)

    @contextmanager
    def step(self, number: int) -> Iterator[Loaded]:
        """Wait until the bytes of a step have been read, and lend them until the end of the block."""
        with self._change:
            self._change.wait_for(lambda: number in self._loaded or not self._running)
            loaded, buffer = self._loaded.pop(number, (Loaded(), None))
        try:
            yield loaded
        finally:
            if buffer is not None:
                self._give_back(buffer)

    def _give_back(self, buffer: torch.Tensor) -> None:
        with self._change:
            self._free.append(buffer)
            self._change.notify_all()

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                number, ranges, buffer = work
                loaded = self._load(ranges, buffer)
                with self._change:
                    self._loaded[number] = loaded, buffer
                    self._change.notify_all()
        finally:
            with self._change:
                self._running -= 1
                self._change.notify_all()

    def _next(self) -> tuple[int, list[FileRange], torch.Tensor] | None:
        with self._change:
            self._change.wait_for(lambda: self._ended or self._free)
            step = None if self._ended else next(self._steps, None)
            return None if step is None else (*step, self._free.popleft())

    def _load(self, ranges: list[FileRange], buffer: torch.Tensor) -> Loaded:
        spans, begin = [], 0
        for span in _spans(ranges):
            before = span.offset % _ALIGNMENT
            end = begin + -(-(before + span.nbytes) // _ALIGNMENT) * _ALIGNMENT
            if span.file in self._cold and end <= len(buffer) and self._fill(buffer[begin:end], span, before):
                spans.append((span, buffer[begin + before : begin + before + span.nbytes]))
                begin = end
        return Loaded(spans)

    def _fill(self, memory: torch.Tensor, span: FileRange, before: int) -> bool:
        """Read a span with the bytes before and after it; return whether that succeeded."""
        # Opened for each span: a model can have more files than a process may open.
        with suppress(OSError, SourceReleasedError), span.file.direct_descriptor() as fd:
            return os.preadv(fd, (storage_bytes(memory),), span.offset - before) >= before + span.nbytes
        return False


def _is_in_page_cache(file: TensorFile) -> bool:
    return all(map(file.is_in_page_cache, range(0, file.size, -(-file.size // _SAMPLES) or 1)))


def _large_pages(nbytes: int, count: int) -> Iterator[torch.Tensor]:
    """Yield buffers in large pages: into small ones, a virtual disk read at a third of its rate at times."""
    pages = mmap.mmap(-1, count * nbytes + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # Linux only, where the kernel has them
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    start = -memory.data_ptr() % _LARGE_PAGE
    for begin in range(start, start + count * nbytes, nbytes):
        yield memory[begin : begin + nbytes]


def _spans(ranges: Iterable[FileRange]) -> Iterator[FileRange]:
    """Join the ranges of each file: a model can have many thousands of small tensors."""
    by_file: dict[TensorFile, list[FileRange]] = {}
    for each in ranges:
        by_file.setdefault(each.file, []).append(each)
    for file, some in by_file.items():
        begin = min(each.offset for each in some)
        end = max(each.offset + each.nbytes for each in some)
        if end - begin <= _MAX_SPAN * sum(each.nbytes for each in some):
            yield FileRange(file, begin, end - begin)
