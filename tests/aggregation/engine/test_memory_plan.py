# SPDX-License-Identifier: Apache-2.0
"""The memory plan and the arena."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvflare_lazy.aggregation import aggregate
from nvflare_lazy.aggregation._engine import passes
from nvflare_lazy.aggregation._engine.memory_plan import BLOCK, Arena, SpareMemory, plan_memory
from nvflare_lazy.aggregation._engine.tile import Tile
from nvflare_lazy.errors import MemoryBudgetError


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
        """All arenas together stay within the budget, tiles have complete blocks, and threads are used if possible."""
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

    def test_a_short_vector_takes_little(self):
        """A tile is not longer than the tensors that are reduced."""
        assert plan_memory(64 << 20, 48, longest=BLOCK + 1).tile == 2 * BLOCK

    @pytest.mark.parametrize(("itemsize", "tile"), [(1, 1 << 19), (2, 1 << 19), (4, 1 << 18), (8, 1 << 17)])
    def test_the_fastest_tile_depends_on_the_dtype(self, itemsize, tile):
        """A tile has at most 1 MiB of each contribution, and at most 512 Ki elements; a caller may ask for more."""
        assert plan_memory(1 << 30, 24, itemsize=itemsize).tile == tile
        assert plan_memory(1 << 30, 24, itemsize=itemsize, tile=1 << 20).tile == 1 << 20

    def test_fewer_threads_rather_than_tiny_tiles(self):
        """Eight threads on 2 MiB would spend their time on calls."""
        assert plan_memory(2 << 20, 48, threads=8).threads < 8
        assert plan_memory(64 << 20, 48, threads=8).threads == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_of_an_aggregation(tmp_path, monkeypatch, dtype):
    """The engine plans with the size of the elements that it reads."""
    counts = []

    def record(group, start, count, *rest):
        counts.append(count)
        return Tile(group, start, count, *rest)

    monkeypatch.setattr(passes, "Tile", record)
    contributions = {name: {"w": torch.zeros(5 << 18, dtype=dtype)} for name in ("a", "b")}
    aggregate(contributions, tmp_path / "mean.safetensors", memory_budget="64MiB", fsync=False)
    assert max(counts) * dtype.itemsize == 1 << 20


class TestArena:
    """Memory is allocated once and reused."""

    def test_takes_and_gives_back(self):
        """Released memory is used again; memory in use is never shared."""
        arena = Arena(4096)
        first, buffer = arena.take_buffer(torch.float32, 100)
        mark = arena.mark()
        second = arena.take(torch.float64, 10).fill_(1)
        first.fill_(7)
        assert second.sum() == 10
        assert np.frombuffer(buffer, np.float32).tolist() == [7] * 100
        arena.release(mark)
        assert arena.take(torch.float64, 10) is second

    def test_more_than_announced(self):
        """A rule that takes more than it declared has a bug."""
        with pytest.raises(AssertionError, match="more is taken for a tile than was announced"):
            Arena(64).take(torch.float32, 100)


def test_spare_memory():
    """A later arena has the memory of an earlier one if it is large enough, and never that of one in use."""
    spare = SpareMemory()
    with spare.arena(8192) as first:
        place = first.take(torch.uint8, 8192).data_ptr()
        with spare.arena(4096) as other:
            assert not place <= other.take(torch.uint8, 4096).data_ptr() < place + 8192
    with spare.arena(4096) as again:
        assert again.take(torch.uint8, 4096).data_ptr() == place
        with pytest.raises(AssertionError):
            again.take(torch.uint8, 1)
    with spare.arena(1 << 20) as larger:
        larger.take(torch.uint8, 1 << 20).fill_(1)
