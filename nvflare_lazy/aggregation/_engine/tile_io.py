# SPDX-License-Identifier: Apache-2.0
"""Many tensors as one long vector, which is read and written in tiles across tensor boundaries.

Used between the entries of a contribution and its tiles. Callers treat a tile of one large matrix and a tile of a
thousand biases alike; tensors that are adjacent in a file are read with one request.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from contextlib import ExitStack
from itertools import accumulate, groupby
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from nvflare_lazy.aggregation._engine.read_ahead import FileRange
from nvflare_lazy.tensors.converted_sources import CastSource
from nvflare_lazy.tensors.tensor_file import FileSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer, Self

    from nvflare_lazy.tensors.byte_source import ByteSource
    from nvflare_lazy.tensors.entry import TensorEntry, TensorSpec
    from nvflare_lazy.tensors.tensor_file import TensorFile

# Complex numbers are processed as two real numbers each, bools as zero or one.
_NUMBERS = {torch.complex64: torch.float32, torch.bool: torch.uint8}


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the real numbers that represent elements of `dtype`."""
    return _NUMBERS.get(dtype, dtype)


def real_numel(spec: TensorSpec) -> int:
    """Return the number of real numbers that a tensor consists of."""
    return prod(spec.shape) * (spec.dtype.itemsize // real_dtype(spec.dtype).itemsize)


class InputVector:
    """Tensors of one contributor, all read in one dtype, one after the other.

    Inside its `with` block, file descriptors are borrowed once, instead of once for each tile.

    Args:
        entries: The tensors.
        dtype: The dtype to read them in. Tensors of another floating-point dtype are converted.
    """

    def __init__(self, entries: Sequence[TensorEntry], dtype: torch.dtype) -> None:
        self.dtype = real_dtype(dtype)
        sources: list[ByteSource] = []
        for own, some in groupby((entry for entry in entries if entry.numel), lambda entry: entry.dtype):
            joined = _joined([entry.rows() for entry in some])
            sources += joined if own is dtype else [CastSource(source, own, dtype) for source in joined]
        self._set_sources(sources)

    @classmethod
    def over(cls, sources: Sequence[ByteSource], dtype: torch.dtype) -> InputVector:
        """Return the vector of the elements of some sources, which have this dtype already."""
        vector = cls((), dtype)
        vector._set_sources(sources)
        return vector

    def _set_sources(self, sources: Sequence[ByteSource]) -> None:
        self._sources = [*sources]
        self._ends = list(accumulate(source.nbytes for source in sources))
        self.nbytes = self._ends[-1] if self._ends else 0
        self.numel = self.nbytes // self.dtype.itemsize
        self._borrowed = ExitStack()
        self._places: list[tuple[int, int] | None] = [None] * len(sources)
        self._only_place: tuple[int, int] | None = None

    def sources(self, start: int, count: int) -> list[ByteSource]:
        """Return the sources of `count` elements starting at `start`, for `over`."""
        begin, stop = start * self.dtype.itemsize, (start + count) * self.dtype.itemsize
        found = []
        for index in range(bisect_right(self._ends, begin), len(self._sources)):
            source = self._sources[index]
            first = self._ends[index] - source.nbytes
            if first >= stop:
                break
            inside = max(begin - first, 0)
            found.append(source.slice(inside, min(stop - first, source.nbytes) - inside))
        return found

    def files(self) -> set[TensorFile]:
        """Return the files of all elements that are in files."""
        return {each.file for each in self.file_ranges(0, self.numel)}

    def file_ranges(self, start: int, count: int) -> list[FileRange]:
        """Return the places of `count` elements starting at `start` that are in files."""
        ranges = (FileRange.of(source, 0, source.nbytes) for source in self.sources(start, count))
        return [each for each in ranges if each is not None]

    def __enter__(self) -> Self:
        with ExitStack() as borrowed:
            numbers: dict[TensorFile, int] = {}
            for index, source in enumerate(self._sources):
                place = source.file_range()
                if place is not None:
                    file, offset = place
                    if file not in numbers:
                        numbers[file] = borrowed.enter_context(file.descriptor())
                    self._places[index] = (numbers[file], offset)
            self._borrowed = borrowed.pop_all()
        # The tensors of most files are one range.
        self._only_place = self._places[0] if len(self._places) == 1 else None
        return self

    def __exit__(self, *error: object) -> None:
        self._places = [None] * len(self._sources)
        self._only_place = None
        self._borrowed.close()

    def read(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the elements starting at `start`."""
        offset, done = start * self.dtype.itemsize, 0
        if self._only_place is not None and _read_at_once(self._only_place, buffer, offset):
            return
        index = bisect_right(self._ends, offset)
        while done < len(buffer):
            source, end = self._sources[index], self._ends[index]
            count = min(end - offset, len(buffer) - done)
            inside = offset - end + source.nbytes
            part = buffer[done : done + count]
            if not _read_at_once(self._places[index], part, inside):
                source.read_into(part, inside)
            offset, done, index = offset + count, done + count, index + 1


def _read_at_once(place: tuple[int, int] | None, part: memoryview, offset: int) -> bool:
    """Read from a borrowed descriptor; if that fails, return False, and the source reads or raises."""
    if place is None:
        return False
    try:
        return os.preadv(place[0], (part,), place[1] + offset) == len(part)
    except OSError:
        return False


class _Stretch(NamedTuple):
    name: str
    begin: int
    end: int


class TensorWriter(Protocol):
    """The writer of an `OutputVector`, such as a `StreamingWriter`."""

    def position(self, name: str) -> int:
        """Return where in its file the first byte of a tensor goes."""

    def write(self, name: str, offset: int, data: Buffer) -> None:
        """Write bytes of a tensor at an offset, from any thread."""


class OutputVector:
    """Tensors of a file that is being written, all of one dtype, one after the other."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int], dtype: torch.dtype, writer: TensorWriter) -> None:
        self.dtype = dtype
        self._writer = writer
        ends = accumulate(size * dtype.itemsize for size in sizes)
        self._stretches = [
            _Stretch(name, end - size * dtype.itemsize, end)
            for name, size, end in zip(names, sizes, ends, strict=True)
            if size
        ]
        self._ends = [stretch.end for stretch in self._stretches]

    def elements_to_multiple(self, nbytes: int) -> int:
        """Return how many elements end at or before the first multiple of `nbytes` in the file of the first tensor."""
        if not self._stretches:
            return 0
        return -self._writer.position(self._stretches[0].name) % nbytes // self.dtype.itemsize

    def write(self, start: int, buffer: memoryview) -> None:
        """Write the elements starting at `start`."""
        for name, offset, piece in self.pieces(start, buffer):
            self._writer.write(name, offset, piece)

    def pieces(self, start: int, buffer: memoryview) -> Iterator[tuple[str, int, memoryview]]:
        """Yield name, offset and bytes for each tensor in `buffer`, for the elements starting at `start`."""
        offset, done = start * self.dtype.itemsize, 0
        index = bisect_right(self._ends, offset)
        while done < len(buffer):
            name, begin, end = self._stretches[index]
            count = min(end - offset, len(buffer) - done)
            yield name, offset - begin, buffer[done : done + count]
            offset, done, index = offset + count, done + count, index + 1


def _joined(sources: Sequence[ByteSource]) -> list[ByteSource]:
    """Return the sources, with adjacent sources of one file merged."""
    joined: list[ByteSource] = []
    last = None
    for source in sources:
        place = source.file_range()
        if place is not None and last is not None and place[0] is last[0] and place[1] == last[1] + joined[-1].nbytes:
            file, offset = last
            joined[-1] = FileSource(file, offset, joined[-1].nbytes + source.nbytes)
        else:
            joined.append(source)
            last = place
    return joined
