# SPDX-License-Identifier: Apache-2.0
"""The passes over a round's tiles: passes that compute statistics, and the pass that reduces and writes.

Runs the reduction of a rule, in threads, on one set of contributions. If a contribution fails, `ContributionError`
ends the pass, and the caller skips the contribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from nvflare_lazy.aggregation._engine.memory_plan import BLOCK, plan_memory
from nvflare_lazy.aggregation._engine.read_ahead import READERS, STEP_BYTES, ReadAhead
from nvflare_lazy.aggregation._engine.tile import Tile
from nvflare_lazy.aggregation._engine.tile_io import OutputVector
from nvflare_lazy.aggregation._engine.tile_pool import run_tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from nvflare_lazy.aggregation._engine.memory_plan import Arena, MemoryPlan, SpareMemory
    from nvflare_lazy.aggregation._engine.read_ahead import Loaded
    from nvflare_lazy.aggregation._engine.tile import NonFinitePolicy, TensorGroup
    from nvflare_lazy.aggregation._engine.tile_io import TensorWriter
    from nvflare_lazy.aggregation._engine.tile_pool import PassMonitor
    from nvflare_lazy.aggregation.reduction import Reduction
    from nvflare_lazy.aggregation.statistics import Statistic

# A group, and the begin and the end of some of its elements.
_Range: TypeAlias = "tuple[TensorGroup, int, int]"

# Statistics are summed in stretches of this number of elements, one after the other, for every tile size.
STRETCH = 128 * BLOCK
# Reading ahead may take this share of the budget. A median of 16 contributors took a quarter less time with steps of 24
# MiB than of 8 MiB. In a small model, steps are smaller: until the first one has been read, nothing is computed.
_READ_AHEAD_SHARE = 1 / 2
_MAX_STEP_BYTES = 24 << 20
_MIN_STEPS = 32


@dataclass(frozen=True)
class Engine:
    """Passes over some groups of tensors, within a budget of bytes for all threads together.

    Default: one thread per core, the fastest size of tiles, and memory that is freed after each pass.
    """

    groups: Sequence[TensorGroup]
    budget: int
    threads: int | None
    tile_bytes: int | None
    non_finite: NonFinitePolicy
    monitor: PassMonitor
    spare: SpareMemory | None = None

    def compute_statistic(self, statistic: Statistic) -> Any:
        """Read all floating-point tensors and return the result of the statistic."""
        count = max(len(group.members) for group in self.groups)
        totals = torch.zeros(statistic.num_sums(count), dtype=torch.float64)
        self.sum_stretches(statistic, totals.add_)
        return statistic.result(totals.numpy(), count)

    def sum_stretches(self, statistic: Statistic, collect: Callable[[torch.Tensor], object]) -> None:
        """Read all floating-point tensors, and pass the sums of each stretch to `collect`, in the order of stretches.

        Their sum over all stretches, added in this order, is what the statistic computes its result from.
        """
        groups = [group for group in self.groups if group.is_float]
        count = max(len(group.members) for group in self.groups)
        sums = statistic.num_sums(count)
        plan = plan_memory(
            self.budget,
            statistic.bytes_per_element(count) + _buffer_bytes(groups),
            threads=self.threads,
            tile=min(self._tile_of(groups) or STRETCH, STRETCH),
            fixed=sums * (STRETCH // BLOCK) * 8,
        )

        def work(task: tuple[TensorGroup, int, int], arena: Arena) -> torch.Tensor:
            group, start, end = task
            blocks = arena.take(torch.float64, sums * (STRETCH // BLOCK)).view(sums, STRETCH // BLOCK)
            blocks.zero_()
            for begin in range(start, end, plan.tile):
                mark = arena.mark()
                tile = Tile(group, begin, min(plan.tile, end - begin), arena, self.non_finite)
                first = (begin - start) // BLOCK
                statistic.accumulate(tile, blocks[:, first : first + -(-tile.count // BLOCK)])
                self.monitor.advance(tile.nbytes)
                arena.release(mark)
            return blocks.sum(dim=1)

        self.monitor.start(statistic.name, sum(map(bytes_to_read, groups)))
        stretches = chain.from_iterable(_tiles(group, STRETCH) for group in groups)
        run_tiles(stretches, work, plan, self.monitor, collect=collect, spare=self.spare)

    def reduce(self, reduction: Reduction, stage: str, writer: TensorWriter) -> None:
        """Reduce all tiles and write them; `stage` is the name of the pass in progress bars."""
        outputs = {
            group.index: OutputVector(group.names, group.sizes, group.inputs[0].dtype, writer) for group in self.groups
        }
        count = max(len(group.members) for group in self.groups)
        out_bytes = max(group.inputs[0].dtype.itemsize for group in self.groups)
        plan = plan_memory(
            self.budget,
            reduction.bytes_per_element(count) + out_bytes + _buffer_bytes(self.groups),
            threads=self.threads,
            tile=self._tile_of(self.groups),
            itemsize=out_bytes,
            longest=max(group.numel for group in self.groups),
        )

        def reduce_tile(task: _Range, arena: Arena, loaded: Loaded | None = None) -> None:
            group, start, end = task
            mark = arena.mark()
            tile = Tile(group, start, end - start, arena, self.non_finite, loaded)
            out, buffer = arena.take_buffer(group.inputs[0].dtype, tile.count)
            reduction.reduce(tile, out)
            outputs[group.index].write(start, buffer)
            self.monitor.advance(tile.nbytes)
            arena.release(mark)

        def reduce_step(task: tuple[int, list[_Range]], arena: Arena) -> None:
            with ahead.step(task[0]) as loaded:
                for each in task[1]:
                    reduce_tile(each, arena, loaded)

        def tiles() -> Iterator[_Range]:
            # They end at multiples of their size in the file: the page cache has larger pages for aligned writes.
            for group in self.groups:
                output = outputs[group.index]
                yield from _tiles(group, plan.tile, output.elements_to_multiple(plan.tile * output.dtype.itemsize))

        self.monitor.start(stage, sum(map(bytes_to_read, self.groups)))
        step_bytes, buffer_bytes = self._step_bytes(plan)
        files = (file for group in self.groups for vector in group.inputs for file in vector.files())
        steps = (
            [
                place
                for group, start, end in step
                for vector in group.inputs
                for place in vector.file_ranges(start, end - start)
            ]
            for step in _steps(tiles(), step_bytes)
        )
        with ReadAhead(files if buffer_bytes else (), steps, plan.threads, buffer_bytes) as ahead:
            if ahead.is_reading:
                tasks = enumerate(_steps(tiles(), step_bytes))
                run_tiles(tasks, reduce_step, plan, self.monitor, spare=self.spare)
            else:
                run_tiles(tiles(), reduce_tile, plan, self.monitor, spare=self.spare)

    def _step_bytes(self, plan: MemoryPlan) -> tuple[int, int]:
        """Return how many bytes of contributions a step has, and how many of them are read ahead: those with memory."""
        total, of_tile = sum(map(bytes_to_read, self.groups)), plan.tile * max(map(_bytes_of_element, self.groups))
        step = max(STEP_BYTES, of_tile, min(_MAX_STEP_BYTES, total // _MIN_STEPS))
        room = min(int(self.budget * _READ_AHEAD_SHARE), self.budget - plan.threads * plan.arena)
        room //= plan.threads + READERS
        return step, min(step, room) if room >= STEP_BYTES else 0

    def _tile_of(self, groups: Sequence[TensorGroup]) -> int | None:
        if self.tile_bytes is None or not groups:
            return None
        return self.tile_bytes // max(group.inputs[0].dtype.itemsize for group in groups)


def _steps(tiles: Iterable[_Range], step_bytes: int) -> Iterator[list[_Range]]:
    """Yield the tiles that a thread processes one after the other, so that enough bytes of a file are read at once."""
    step: list[_Range] = []
    room = step_bytes
    for group, start, end in tiles:
        nbytes = (end - start) * _bytes_of_element(group)
        if nbytes > room and step:
            yield step
            step, room = [], step_bytes
        step.append((group, start, end))
        room -= nbytes
    if step:
        yield step


def _tiles(group: TensorGroup, step: int, first: int = 0) -> Iterator[_Range]:
    """Yield the begin and the end of each tile; the first one is shorter than a step if it ends at `first`."""
    ends = [*range(first or step, group.numel, step), group.numel]
    for start, end in pairwise([0, *ends]):
        yield group, start, end


def bytes_to_read(group: TensorGroup) -> int:
    """Return the number of bytes that a pass reads of a group."""
    return group.numel * _bytes_of_element(group)


def _bytes_of_element(group: TensorGroup) -> int:
    return group.inputs[0].dtype.itemsize * len(group.members)


def _buffer_bytes(groups: Sequence[TensorGroup]) -> int:
    """Return the number of bytes that an element takes in the read buffers of a tile."""
    of_values = max((group.inputs[0].dtype.itemsize for group in groups), default=1)
    of_reference = max((group.reference.dtype.itemsize for group in groups if group.reference is not None), default=0)
    return of_values + of_reference
