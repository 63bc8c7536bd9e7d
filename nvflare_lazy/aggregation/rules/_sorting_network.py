# SPDX-License-Identifier: Apache-2.0
"""A sorting network that sorts the contributors' values for all elements of a tile, by minima and maxima.

Used by the coordinate-wise rules. A sorting network makes the same comparisons for all data, so each comparison is one
pass of the vector unit over a tile; comparisons that do not affect the wanted ranks are omitted. The network is
Batcher's merge exchange: Knuth, The Art of Computer Programming, volume 3, algorithm 5.2.2 M.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from nvflare_lazy.aggregation._engine.rounding import FLOATS
from nvflare_lazy.aggregation._engine.unlocked import sort

if TYPE_CHECKING:
    from nvflare_lazy.aggregation._engine.tile import Tile

_SIGN = -(1 << 63)


class Comparison(NamedTuple):
    """One comparison of a network: the smaller value goes to `low`, the larger to `high`, if they are needed."""

    low: int
    high: int
    needs_low: bool
    needs_high: bool


@cache
def sorting_network(wires: int, first: int, last: int) -> tuple[Comparison, ...]:
    """Return comparisons of `wires` values that bring those of rank `first` to `last` to these wires, in order."""
    wanted = set(range(first, last + 1))
    kept = []
    for low, high in reversed(_merge_exchange(wires)):
        if low in wanted or high in wanted:
            kept.append(Comparison(low, high, low in wanted, high in wanted))
            wanted |= {low, high}
    return tuple(reversed(kept))


def _merge_exchange(wires: int) -> list[tuple[int, int]]:
    comparisons = []
    top = 1 << max(wires - 1, 1).bit_length() - 1
    p = top
    while p:
        q, r, d = top, 0, p
        while True:
            comparisons += [(i, i + d) for i in range(wires - d) if i & p == r]
            if q == p:
                break
            q, r, d = q // 2, p, q - p
        p //= 2
    return comparisons


def bytes_for_sorting(contributors: int) -> int:
    """Return the maximum number of bytes that `sorted_values` takes for each element."""
    return 8 * (contributors + 1)


def sorted_values(tile: Tile, indices: list[int], first: int, last: int) -> list[torch.Tensor]:
    """Return the values with ranks `first` to `last`, element by element; a NaN ranks as infinity.

    The values are exact, in a dtype at least as wide as theirs; zeros are positive.

    Args:
        tile: The tile to read.
        indices: The contributors, as indices into the members of the tile's group.
        first: The lowest wanted rank.
        last: The highest wanted rank.
    """
    dtype = tile.group.inputs[0].dtype
    wide = torch.int64 if dtype not in FLOATS else torch.float64 if dtype == torch.float64 else torch.float32
    spare = tile.arena.take(wide, tile.count)
    memory = [tile.arena.take_buffer(wide, tile.count) for _ in indices]

    def load_and_sort(*, has_nan: bool) -> list[torch.Tensor]:
        for wire, index in zip(memory, indices, strict=True):
            _load(wire, index, tile, has_nan=has_nan)
        return _sort([values for values, _ in memory], spare, first, last)

    ranked = load_and_sort(has_nan=False)
    if dtype in FLOATS:
        # Every rank depends on every value, and a minimum or maximum with a NaN is NaN.
        if not torch.isfinite(ranked[0].sum()) and torch.isnan(ranked[0]).any():
            ranked = load_and_sort(has_nan=True)
        for values in ranked:
            # Which of two zeros with different signs a minimum returns depends on their position in the tile.
            values.add_(0.0)
    return [values.bitwise_xor_(_SIGN).view(torch.uint64) for values in ranked] if dtype == torch.uint64 else ranked


def _load(wire: tuple[torch.Tensor, memoryview], index: int, tile: Tile, *, has_nan: bool) -> None:
    """Read the values of a contributor, without a copy if the wire has their dtype."""
    values, _ = wire
    if values.dtype == tile.group.inputs[index].dtype:
        tile.read(index, wire)
    elif tile.group.inputs[index].dtype == torch.uint64:
        # Flipping the sign bit makes the signed order the unsigned one.
        torch.bitwise_xor(tile.read(index).view(torch.int64), _SIGN, out=values)
    else:
        values.copy_(tile.read(index))
    if has_nan:
        values.nan_to_num_(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))


def _sort(wires: list[torch.Tensor], spare: torch.Tensor, first: int, last: int) -> list[torch.Tensor]:
    return sort(wires, spare, *_as_lists(len(wires), first, last))[first : last + 1]


@cache
def _as_lists(wires: int, first: int, last: int) -> tuple[list[int], list[int], list[int]]:
    comparisons = sorting_network(wires, first, last)
    needs = [needs_low + 2 * needs_high for _, _, needs_low, needs_high in comparisons]
    return [low for low, _, _, _ in comparisons], [high for _, high, _, _ in comparisons], needs
