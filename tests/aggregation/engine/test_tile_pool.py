# SPDX-License-Identifier: Apache-2.0
"""Threads that run tiles."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from nvflare_lazy.aggregation._engine.memory_plan import BLOCK, MemoryPlan
from nvflare_lazy.aggregation._engine.tile_pool import PassMonitor, run_tiles


class TestWorkers:
    """Threads that work through tasks."""

    PLAN = MemoryPlan(threads=4, tile=BLOCK, arena=4096)

    def test_results_come_in_order(self):
        """Any thread takes the next one."""
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
