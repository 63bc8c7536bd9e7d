# SPDX-License-Identifier: Apache-2.0
"""Bulyan: selects updates by Krum, then averages for each element the values closest to their median.

El Mhamdi, Guerraoui, Rouault: The Hidden Vulnerability of Distributed Learning in Byzantium, ICML 2018,
https://arxiv.org/abs/1802.07927. Tolerates malicious contributors that change a single element by a large amount, which
Krum alone does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from nvflare_lazy.aggregation._engine.mean import MEAN_BYTES, Weights, mean_into
from nvflare_lazy.aggregation.reduction import Reduction
from nvflare_lazy.aggregation.rules._sorting_network import bytes_for_sorting, sorted_values
from nvflare_lazy.aggregation.rules.base import ByzantineTolerantRule
from nvflare_lazy.aggregation.rules.krum import krum_scores
from nvflare_lazy.aggregation.statistics import PairwiseDistances

if TYPE_CHECKING:
    from nvflare_lazy.aggregation._engine.tile import Tile
    from nvflare_lazy.aggregation.rules.base import RoundContext


@dataclass(frozen=True)
class Bulyan(ByzantineTolerantRule):
    """Selects n - 2f updates by Krum, one at a time; averages for each element the n - 4f closest to its median.

    Args:
        num_byzantine: Number of malicious (Byzantine) contributors to tolerate, f.
    """

    name: ClassVar[str] = "bulyan"
    uses_order: ClassVar[bool] = True

    @property
    def min_contributors(self) -> int:
        return 4 * self.num_byzantine + 3

    def prepare(self, this_round: RoundContext) -> Reduction:
        chosen = _choose(this_round.compute_statistic(PairwiseDistances()), self.num_byzantine)
        this_round.annotate(selected=[this_round.names[index] for index in chosen])
        return _AroundTheMedian(chosen, 2 * self.num_byzantine)


def _choose(distances: np.ndarray[Any, Any], num_byzantine: int) -> list[int]:
    left = [*range(len(distances))]
    chosen = []
    for _ in range(len(distances) - 2 * num_byzantine):
        best = left[int(np.argmin(krum_scores(distances[np.ix_(left, left)], num_byzantine)))]
        chosen.append(best)
        left.remove(best)
    return sorted(chosen)


class _AroundTheMedian(Reduction):
    def __init__(self, chosen: list[int], drop: int) -> None:
        self._chosen = chosen
        self._drop = drop

    def bytes_per_element(self, contributors: int) -> int:
        return bytes_for_sorting(contributors) + 8 * contributors + 3 * 8 + 1 + MEAN_BYTES

    def reduce(self, tile: Tile, out: torch.Tensor) -> None:
        values = sorted_values(tile, self._chosen, 0, len(self._chosen) - 1)
        keep = len(values) - self._drop
        closest = self._closest(values, keep, tile) if self._drop else values
        mean_into(out, closest.__getitem__, Weights.of([1] * keep), tile.arena)

    def _closest(self, values: list[torch.Tensor], keep: int, tile: Tile) -> list[torch.Tensor]:
        """Return the values closest to the median: a window over the sorted values, moved up while that is closer."""
        arena, count = tile.arena, tile.count
        median, below, above = (arena.take(torch.float64, count) for _ in range(3))
        slides = arena.take(torch.bool, count)
        middle = len(values) // 2
        median.copy_(values[middle])
        if len(values) % 2 == 0:
            # Halves first: a sum may be too large for float64.
            median.mul_(0.5).add_(below.copy_(values[middle - 1]).mul_(0.5))
        window = [arena.take(values[0].dtype, count).copy_(value) for value in values[:keep]]
        for step in range(self._drop):
            torch.sub(median, below.copy_(values[step]), out=below)
            above.copy_(values[step + keep]).sub_(median)
            torch.gt(below, above, out=slides)
            for place, kept in enumerate(window):
                torch.where(slides, values[step + 1 + place], kept, out=kept)
        return window
