# SPDX-License-Identifier: Apache-2.0
"""Reading files into the page cache before the threads of a pass need them, so that the disk works while they compute.

The threads read short parts of several files, and the kernel reads ahead only a little of each. Hints
(`POSIX_FADV_WILLNEED`) make it fill the page cache with its smallest pages, which took more time than they gained.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from nvflare_lazy.errors import SourceReleasedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from typing_extensions import Self

    from nvflare_lazy.tensors.byte_source import ByteSource
    from nvflare_lazy.tensors.tensor_file import TensorFile

_MAX_AHEAD = 128 << 20
# One alone did not keep a fast disk busy.
_READERS = 3
# Ranges of a file that have gaps between them are read with the gaps, unless these are longer than the ranges.
_MAX_SPAN = 2
# Bytes of a file that are looked up; if the page cache has all of them, the file is not read ahead.
_SAMPLES = 16


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


class Step(NamedTuple):
    """What the threads need next.

    Attributes:
        nbytes: Bytes to count when they have been used.
        ranges: Those of them that are in files.
    """

    nbytes: int
    ranges: list[FileRange]


class ReadAhead:
    """Threads that read files into the page cache while the block runs, but not far ahead of `advance()`.

    Args:
        steps: What the threads of the pass need, in about that order.
    """

    def __init__(self, steps: Iterable[Step]) -> None:
        self._steps = iter(steps)
        self._is_cached: dict[TensorFile, bool] = {}
        self._begun = 0
        self._used = 0
        self._ended = False
        self._change = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"read-ahead-{number}", daemon=True) for number in range(_READERS)
        ]

    def __enter__(self) -> Self:
        if sys.platform == "linux":
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._change:
            self._ended = True
            self._change.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def advance(self, nbytes: int) -> None:
        """Count bytes that have been used, from any thread."""
        with self._change:
            self._used += nbytes
            self._change.notify_all()

    def _run(self) -> None:
        while (step := self._next()) is not None:
            for file, offset, nbytes in _spans(step.ranges):
                # The thread that needs the bytes gets the same error.
                with suppress(OSError, SourceReleasedError):
                    if not self._knows_cached(file):
                        file.read_into_page_cache(offset, nbytes)

    def _next(self) -> Step | None:
        with self._change:
            step = next(self._steps, None)
            self._change.wait_for(lambda: self._ended or self._begun - self._used < _MAX_AHEAD)
            if step is None or self._ended:
                return None
            self._begun += step.nbytes
            return step

    def _knows_cached(self, file: TensorFile) -> bool:
        if file not in self._is_cached:
            places = range(0, file.size, -(-file.size // _SAMPLES))
            self._is_cached[file] = all(map(file.is_in_page_cache, places))
        return self._is_cached[file]


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
