# SPDX-License-Identifier: Apache-2.0
"""The number of threads and the tile size that fit a memory budget, and the memory of each thread.

Each thread allocates its memory once; nothing is allocated while tiles are read, reduced and written.
"""

from __future__ import annotations

import mmap
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nvflare_lazy._system import available_cores
from nvflare_lazy._text import format_size
from nvflare_lazy.errors import MemoryBudgetError
from nvflare_lazy.tensors.tensor_memory import storage_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Tiles start at multiples of this number of elements: statistics are summed in such blocks, for every tile size.
BLOCK = 512
# Larger tiles leave the cache and are not faster; in tiles below the comfortable size, calls cost more than their work.
_MAX_TILE = 1024 * BLOCK
# A mean in float32 took 14 % longer with 2 MiB of each contribution than with 1 MiB.
# In bfloat16, 512 KiB were not faster.
_MAX_TILE_BYTES = 1 << 20
_COMFORTABLE_TILE = 16 * BLOCK
_CACHE_SHARE = 16 << 20
_ALIGNMENT = 64
# For the gaps between aligned tensors.
_SLACK = 16 << 10
_MAX_VIEWS = 512


@dataclass(frozen=True)
class MemoryPlan:
    """The resources of a pass over the tiles.

    Attributes:
        threads: Number of threads that read, reduce and write.
        tile: Elements of a tile, a multiple of `BLOCK`.
        arena: Bytes of memory of each thread.
    """

    threads: int
    tile: int
    arena: int


def plan_memory(
    budget: int,
    bytes_per_element: int,
    *,
    threads: int | None = None,
    tile: int | None = None,
    itemsize: int = 1,
    longest: int = 1 << 62,
    fixed: int = 0,
) -> MemoryPlan:
    """Return the number of threads and the tile size that fit into the budget.

    Args:
        budget: Bytes for all threads together.
        bytes_per_element: Bytes for each element of a tile, in all buffers together.
        threads: Maximum number of threads. Default: one per core.
        tile: Maximum number of elements of a tile. Default: the fastest size.
        itemsize: Bytes of an element of a contribution. Default: the size of the elements does not limit a tile.
        longest: Elements of the longest vector; a tile is not longer. Default: unknown.
        fixed: Bytes that each thread needs in addition to its tile.
    """
    fixed += _SLACK
    fast = max(_COMFORTABLE_TILE, min(_MAX_TILE, _MAX_TILE_BYTES // itemsize, _CACHE_SHARE // bytes_per_element))
    most = max(BLOCK, min((tile or fast) // BLOCK, -(-longest // BLOCK)) * BLOCK)
    for count in range(threads or available_cores(), 0, -1):
        fitting = (budget // count - fixed) // bytes_per_element // BLOCK * BLOCK
        if fitting >= min(most, _COMFORTABLE_TILE) or (count == 1 and fitting >= BLOCK):
            elements = min(fitting, most)
            return MemoryPlan(count, elements, elements * bytes_per_element + fixed)
    raise MemoryBudgetError(
        f"a memory budget of {format_size(budget)} is too small: with {bytes_per_element} bytes for each element of "
        f"a tile, at least {format_size(BLOCK * bytes_per_element + fixed)} are needed; raise memory_budget"
    )


class Arena:
    """The memory of one thread, reused for each tile.

    A tensor is valid until it is released; releasing a mark releases everything that was taken after it.
    """

    def __init__(self, nbytes: int, memory: torch.Tensor | None = None) -> None:
        self._memory = _new_memory(nbytes) if memory is None else memory[:nbytes]
        self._bytes = storage_bytes(self._memory)
        self._top = 0
        # Every tile takes the same few tensors, and creating one costs the same time as adding 10,000 numbers.
        self._views: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}

    def take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return an uninitialized tensor of `count` elements."""
        start, nbytes = self._top, count * dtype.itemsize
        self._top += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        assert start + nbytes <= len(self._bytes), "more is taken for a tile than was announced"
        view = self._views.get((start, dtype, count))
        if view is None:
            if len(self._views) == _MAX_VIEWS:
                self._views.clear()
            view = self._memory[start : start + nbytes].view(dtype)
            self._views[(start, dtype, count)] = view
        return view

    def take_buffer(self, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, memoryview]:
        """Return an uninitialized tensor and its bytes."""
        start = self._top
        return self.take(dtype, count), self._bytes[start : start + count * dtype.itemsize]

    def mark(self) -> int:
        """Return a mark for `release`."""
        return self._top

    def release(self, mark: int) -> None:
        """Release everything that was taken since the mark."""
        self._top = mark


class SpareMemory:
    """Memory of arenas that is kept for the next pass.

    Clearing the pages of an arena takes 4 ms: two workers took 5 % longer for an aggregation in parts of 512 MiB.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    @contextmanager
    def arena(self, nbytes: int) -> Iterator[Arena]:
        """Lend an arena. Kept memory that is too small is freed, so there is never more than one for each thread."""
        try:
            memory = self._free.pop()  # atomic
        except IndexError:
            memory = torch.empty(0, dtype=torch.uint8)
        if memory.numel() < nbytes:
            memory = _new_memory(nbytes)
        try:
            yield Arena(nbytes, memory)
        finally:
            self._free.append(memory)


def _new_memory(nbytes: int) -> torch.Tensor:
    """Return memory that the system gets back as soon as it is released.

    It does not ask for huge pages: they saved 3 % of the processor time of a mean in float32, but when the process had
    just freed models, half of the means took two to eight times as long.
    """
    pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
