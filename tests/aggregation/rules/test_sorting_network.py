# SPDX-License-Identifier: Apache-2.0
"""Sorting networks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from nvflare_lazy.aggregation.rules._sorting_network import sorting_network


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
