# SPDX-License-Identifier: Apache-2.0
"""One number, the memory budget, becomes a number of threads and a tile size; each thread gets its memory once.

Between the user's "256MiB" and the tiles of a round: nothing is allocated while tiles are read, reduced and written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nvflare_lazy._system import available_cores
from nvflare_lazy._text import format_size
from nvflare_lazy.errors import MemoryBudgetError
from nvflare_lazy.tensors.tensor_memory import storage_bytes

#: Tiles begin at multiples of this many elements: statistics are summed in blocks of it, whatever the tile size.
BLOCK = 512
# More than this leaves the cache and gains nothing; below the other, calls cost more than the work they do.
_MAX_TILE = 1024 * BLOCK
_COMFORTABLE_TILE = 16 * BLOCK
_CACHE_SHARE = 16 << 20
_ALIGNMENT = 64
# For the gaps that aligning leaves.
_SLACK = 16 << 10
_MAX_VIEWS = 512


@dataclass(frozen=True)
class MemoryPlan:
    """How a pass over the tiles uses the machine.

    Attributes:
        threads: How many threads read, reduce and write.
        tile: Elements of a tile, a multiple of `BLOCK`.
        arena: Bytes of memory that each thread gets.
    """

    threads: int
    tile: int
    arena: int


def plan_memory(
    budget: int, bytes_per_element: int, *, threads: int | None = None, tile: int | None = None, fixed: int = 0
) -> MemoryPlan:
    """Return the number of threads and the tile size that fit into the budget.

    Args:
        budget: Bytes that all threads together may take.
        bytes_per_element: Bytes that an element of a tile takes, in everything that is kept of it.
        threads: How many threads at most; one for each core, if not given.
        tile: Elements of a tile at most; as many as run fastest, if not given.
        fixed: Bytes a thread needs beside its tile.
    """
    fixed += _SLACK
    fast = max(_COMFORTABLE_TILE, min(_MAX_TILE, _CACHE_SHARE // bytes_per_element))
    most = max(BLOCK, (tile or fast) // BLOCK * BLOCK)
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
    """One thread's memory, used again for one tile after the other.

    What is taken stays valid until it is given back; giving back a mark gives back all that was taken after it.

    Args:
        nbytes: Bytes of memory.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8)
        self._bytes = storage_bytes(self._memory)
        self._top = 0
        # The same few tensors are taken for tile after tile, and to make one costs as much as adding 10,000 numbers.
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
        """Return an uninitialized tensor, and its bytes."""
        start = self._top
        return self.take(dtype, count), self._bytes[start : start + count * dtype.itemsize]

    def mark(self) -> int:
        """Return what `release` takes."""
        return self._top

    def release(self, mark: int) -> None:
        """Give back all that was taken since the mark."""
        self._top = mark
