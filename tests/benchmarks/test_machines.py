# SPDX-License-Identifier: Apache-2.0
"""The times that `benchmarks.machines` computes for clusters."""

from __future__ import annotations

import pytest

from benchmarks.machines import Cluster, Constants


def test_what_bounds_the_time():
    """The network, the cores, the storage, and the number of parts each bound the time in turn."""
    constants = Constants({"mean": 2.0}, start=1.0, caller=0.5)

    def seconds(machines: int, network: float = 1e9, storage: float = 1e9, part: float = 1.0) -> float:
        return Cluster(4, network, storage).seconds(machines, "mean", 800.0, 0.0, part, constants) - 1.5

    assert seconds(1) == pytest.approx(100)  # four cores
    assert seconds(2) == pytest.approx(50)
    assert seconds(2, network=4.0) == pytest.approx(100)
    assert seconds(50, storage=80.0) == pytest.approx(10)
    # Five parts for eight workers: three of these are idle.
    assert seconds(2, part=160.0) == pytest.approx(80)
    assert Cluster(4, 10.0, 100.0).seconds(2, "mean", 800.0, 40.0, 1.0, constants) == pytest.approx(53.5)
