# SPDX-License-Identifier: Apache-2.0
"""Sorting networks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from nvflare_lazy.aggregation import aggregate
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
            # Unneeded outputs are not computed: their contents must not matter.
            values[:, low] = smaller if needs_low else -1
            values[:, high] = larger if needs_high else -1
        assert np.array_equal(values[:, first : last + 1], expected[:, first : last + 1])


@pytest.mark.parametrize("wires", range(1, 18))
def test_a_nan_reaches_every_wanted_rank(wires):
    """So one look at one rank shows whether any value was NaN."""
    for first, last in {(0, wires - 1), ((wires - 1) // 2, wires // 2), (wires // 4, wires // 3)}:
        values = [np.where(np.arange(wires) == wire, np.nan, 1.0) for wire in range(wires)]
        for low, high, needs_low, needs_high in sorting_network(wires, first, last):
            smaller, larger = np.minimum(values[low], values[high]), np.maximum(values[low], values[high])
            values[low] = smaller if needs_low else np.ones(wires)
            values[high] = larger if needs_high else np.ones(wires)
        assert np.isnan(values[first : last + 1]).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_medians_of_zeros_infinities_and_nan(tmp_path, dtype, count):
    """The same bits for every size of tiles: a zero is positive, and a NaN ranks as infinity."""
    random = np.random.default_rng(count)
    kinds = torch.tensor([0.0, -0.0, 1.5, -1.5, torch.nan, torch.inf, -torch.inf], dtype=dtype)
    for kinds_here in (kinds, kinds[:4]):
        matrix = kinds_here[torch.from_numpy(random.integers(0, len(kinds_here), (count, 5000)))]
        ranked = torch.where(matrix.isnan(), torch.inf, matrix.double()).add(0.0).sort(dim=0).values
        expected = ranked[(count - 1) // 2] if count % 2 else (ranked[count // 2 - 1] + ranked[count // 2]) / 2
        contributions = {f"site-{number:02d}": {"w": row} for number, row in enumerate(matrix)}
        seen = set()
        for tile in (None, 4096):
            result = aggregate(contributions, tmp_path / "m", "median", tile_size=tile, fsync=False)["w"].materialize()
            seen.add(bytes(result.view(torch.uint8).numpy()))
            assert torch.allclose(result.double(), expected, rtol=0, atol=0, equal_nan=True)
            assert not torch.signbit(result[result == 0]).any()
        assert len(seen) == 1


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


@pytest.mark.parametrize("largest", [0x60000000, 0x7F7FFFFF], ids=["halved", "overflowing"])
def test_medians_of_two_have_the_bits_of_float64(tmp_path, largest):
    """Whether computed in float32, or, if a sum overflows there, in float64; with numbers of every exponent."""
    random = np.random.default_rng(largest)
    bits = random.integers(0, largest, (2, 20_000)) | random.integers(0, 2, (2, 20_000)) << 31
    bits[1, :5000] = bits[0, :5000] ^ random.integers(0, 8, 5000)
    bits[:, 5000:9000] &= 0x807FFFFF
    bits[:, 9000] = largest
    low, high = matrix = torch.from_numpy(bits.astype(np.uint32).view(np.float32))
    expected = ((low.double().add(0.0) + high.double().add(0.0)) / 2).float()
    result = aggregate({"a": {"w": low}, "b": {"w": high}}, tmp_path / "m", "median", fsync=False)["w"].materialize()
    assert torch.equal(result.view(torch.int32), expected.view(torch.int32))
    assert torch.isfinite(matrix).all()
    assert math.isinf((low + high).abs().max()) is (largest == 0x7F7FFFFF)
