# SPDX-License-Identifier: Apache-2.0
"""The parts under the engine: memory plan, arena, vectors, workers, sorting networks."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvflare_lazy.aggregation._engine.memory import BLOCK, Arena, MemoryPlan, plan_memory
from nvflare_lazy.aggregation._engine.threads import PassMonitor, run_tiles
from nvflare_lazy.aggregation._engine.tile_io import InputVector, OutputVector
from nvflare_lazy.aggregation.rules._sorting_network import sorting_network
from nvflare_lazy.errors import MemoryBudgetError, TruncatedSourceError
from nvflare_lazy.formats import StreamingWriter, TensorMeta
from nvflare_lazy.tensors.dtypes import by_torch
from nvflare_lazy.tensors.entry import TensorEntry, entry_of
from nvflare_lazy.tensors.tensor_file import open_source


class TestMemoryPlan:
    """The budget becomes threads and tiles."""

    @given(
        st.integers(1 << 16, 1 << 34),
        st.integers(1, 2000),
        st.integers(1, 64),
        st.none() | st.integers(1, 1 << 22),
        st.integers(0, 1 << 20),
    )
    def test_never_more_than_the_budget(self, budget, per_element, threads, tile, fixed):
        """All arenas together fit, tiles are whole blocks, and as many threads work as can."""
        try:
            plan = plan_memory(budget, per_element, threads=threads, tile=tile, fixed=fixed)
        except MemoryBudgetError:
            assert budget < BLOCK * per_element + fixed + (16 << 10)
            return
        assert plan.threads * plan.arena <= budget
        assert plan.tile % BLOCK == 0
        assert 1 <= plan.threads <= threads
        assert plan.tile * per_element + fixed <= plan.arena
        assert plan.tile <= max(tile or 1 << 62, BLOCK)

    def test_fewer_threads_rather_than_tiny_tiles(self):
        """Eight threads on 2 MiB would spend their time on calls."""
        assert plan_memory(2 << 20, 48, threads=8).threads < 8
        assert plan_memory(64 << 20, 48, threads=8).threads == 8


class TestArena:
    """Memory is taken once and used again."""

    def test_takes_and_gives_back(self):
        """What is given back is taken again; what is not is never shared."""
        arena = Arena(4096)
        first, buffer = arena.take_buffer(torch.float32, 100)
        mark = arena.mark()
        second = arena.take(torch.float64, 10).fill_(1)
        first.fill_(7)
        assert second.sum() == 10
        assert np.frombuffer(buffer, np.float32).tolist() == [7] * 100
        arena.give_back(mark)
        assert arena.take(torch.float64, 10) is second

    def test_more_than_announced(self):
        """A rule that takes more than it said is a mistake in the rule."""
        with pytest.raises(AssertionError, match="more is taken for a tile than was announced"):
            Arena(64).take(torch.float32, 100)


def part_of(values, source=None):
    return entry_of(values) if source is None else entry_of(values).over(source)


class TestVectors:
    """Many tensors as one."""

    @given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.data())
    def test_reads_across_tensors(self, sizes, data):
        """Any stretch is what the tensors, one after the other, have there."""
        values = [torch.arange(size, dtype=torch.int32) + 100 * index for index, size in enumerate(sizes)]
        whole = torch.cat(values)
        vector = InputVector([part_of(value) for value in values])
        assert vector.numel == len(whole)
        start = data.draw(st.integers(0, len(whole)))
        count = data.draw(st.integers(0, len(whole) - start))
        out = np.empty(count, np.int32)
        vector.read(start, memoryview(out).cast("B"))
        assert np.array_equal(out, whole[start : start + count].numpy())

    def test_neighbours_in_a_file_are_one_request(self, tmp_path):
        """And a file that was cut short is complained about as ever, by borrowed descriptors as well."""
        path = tmp_path / "numbers"
        np.arange(300, dtype=np.int32).tofile(path)
        file = open_source(path)
        parts = [TensorEntry(file.slice(400 * index, 400), by_torch(torch.int32), (100,)) for index in range(3)]
        vector = InputVector(parts)
        assert len(vector._sources) == 1
        assert len(InputVector(parts[::-1])._sources) == 3
        out = np.empty(250, np.int32)
        with vector:
            vector.read(20, memoryview(out).cast("B"))
            assert np.array_equal(out, np.arange(20, 270))
            with path.open("r+b") as shortened:
                shortened.truncate(800)
            with pytest.raises(TruncatedSourceError, match="numbers ends at byte 800"):
                vector.read(20, memoryview(out).cast("B"))

    def test_writes_across_tensors(self, tmp_path):
        """Tiles are cut where tensors end; each byte is written once."""
        sizes = [3, 0, 5, 1]
        names = [f"t{index}" for index in range(4)]
        metas = [TensorMeta(name, "I32", (size,)) for name, size in zip(names, sizes, strict=True)]
        path = tmp_path / "out.safetensors"
        with StreamingWriter(path, metas) as writer:
            vector = OutputVector(names, sizes, torch.int32, writer)
            for start in (0, 4, 8):
                tile = np.arange(start, min(start + 4, 9), dtype=np.int32)
                vector.write(start, memoryview(tile).cast("B"))
        assert path.read_bytes().endswith(np.arange(9, dtype=np.int32).tobytes())


class TestWorkers:
    """Threads that work through tasks."""

    PLAN = MemoryPlan(threads=4, tile=BLOCK, arena=4096)

    def test_results_come_in_order(self):
        """Whoever is first with them."""
        collected = []
        gate = threading.Event()

        def work(task, arena):
            if task == 0:
                gate.wait(60)
            elif task == 20:
                gate.set()
            return task

        run_tiles(range(50), work, self.PLAN, PassMonitor(), collect=collected.append)
        assert collected == list(range(50))

    def test_first_error_ends_it(self):
        """The rest is not begun, and no thread is left."""
        begun = []

        def work(task, arena):
            begun.append(task)
            if task == 5:
                raise RuntimeError("five")

        before = threading.active_count()
        with pytest.raises(RuntimeError, match="five"):
            run_tiles(itertools.count(), work, self.PLAN, PassMonitor())
        assert threading.active_count() == before
        assert len(begun) < 1_000_000

    def test_each_computes_alone(self):
        """Torch uses one thread in each, from the first operation on."""
        counts = set()

        def work(task, arena):
            torch.ones(100_000).add_(1)
            counts.add(torch.get_num_threads())

        before = torch.get_num_threads()
        for _ in range(20):
            run_tiles(range(8), work, self.PLAN, PassMonitor())
        assert counts == {1}
        assert torch.get_num_threads() == before


@pytest.mark.parametrize("wires", range(1, 11))
def test_networks_sort(wires):
    """Every network for up to ten values, and every pruned one; by the 0-1 principle, zeros and ones are enough."""
    everything = np.array(list(itertools.product([0, 1], repeat=wires)))
    expected = np.sort(everything, axis=1)
    for first, last in itertools.combinations_with_replacement(range(wires), 2):
        values = everything.copy()
        for low, high, needs_low, needs_high in sorting_network(wires, first, last):
            smaller = np.minimum(values[:, low], values[:, high])
            larger = np.maximum(values[:, low], values[:, high])
            # What is not needed is not computed: it must not matter what is there.
            values[:, low] = smaller if needs_low else -1
            values[:, high] = larger if needs_high else -1
        assert np.array_equal(values[:, first : last + 1], expected[:, first : last + 1])


def test_networks_for_many_contributors():
    """Larger ones sort at random, and finding a median takes fewer comparisons than sorting."""
    random = np.random.default_rng(0)
    for wires in (17, 33, 64, 100):
        values = random.integers(0, 50, (200, wires))
        expected = np.sort(values, axis=1)
        for low, high, _, _ in sorting_network(wires, 0, wires - 1):
            pair = values[:, [low, high]]
            values[:, low], values[:, high] = pair.min(axis=1), pair.max(axis=1)
        assert np.array_equal(values, expected)
        assert len(sorting_network(wires, wires // 2, wires // 2)) < len(sorting_network(wires, 0, wires - 1))
