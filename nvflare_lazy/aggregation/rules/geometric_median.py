# SPDX-License-Identifier: Apache-2.0
"""The geometric median: the model whose distances to the updates have the smallest weighted sum.

Pillutla, Kakade, Harchaoui: Robust Aggregation for Federated Learning, IEEE Transactions on Signal Processing 2022,
https://arxiv.org/abs/1912.13445: the smoothed Weiszfeld algorithm. Tolerates malicious contributors with less than half
of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from nvflare_lazy.aggregation.reduction import LinearCombination
from nvflare_lazy.aggregation.rules.base import Rule, scale_weights
from nvflare_lazy.aggregation.statistics import PairwiseDistances

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvflare_lazy.aggregation.reduction import Reduction
    from nvflare_lazy.aggregation.rules.base import RoundContext


@dataclass(frozen=True)
class GeometricMedian(Rule):
    """The weighted geometric median, by the smoothed Weiszfeld algorithm.

    Each iterate is a weighted mean of the updates, so all iterates are computed from the distances between updates, in
    one pass over the updates.

    Args:
        smoothing: Minimum distance; smaller distances are raised to this value.
        iterations: Maximum number of iterations.
        tolerance: Stop when no weight changes by more than this value.
    """

    smoothing: float = 1e-6
    iterations: int = 100
    tolerance: float = 1e-10

    name: ClassVar[str] = "geometric_median"
    uses_weights: ClassVar[bool] = True
    requires_all_tensors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.smoothing > 0 or self.iterations < 1 or self.tolerance < 0:
            raise ValueError("smoothing must be positive, iterations at least 1 and tolerance not negative")

    def prepare(self, this_round: RoundContext) -> Reduction:
        shares, steps = self._solve(this_round.compute_statistic(PairwiseDistances()), this_round.weights)
        this_round.annotate(iterations=steps)
        return LinearCombination(shares.tolist())

    def _solve(self, distances: np.ndarray[Any, Any], stated: Sequence[float]) -> tuple[np.ndarray[Any, Any], int]:
        """Return the share of each update in the median, and the number of iterations."""
        # An update infinitely far from all others gets no weight: infinities would make all other shares NaN.
        reachable = np.isfinite(distances).sum(axis=1) > 1
        weights = scale_weights(np.where(reachable, stated, 0.0) if reachable.any() else stated)
        weights = weights / weights.sum()
        known = np.where(np.isfinite(distances), distances, 0.0)
        shares = weights / weights.sum()
        steps = 0
        while steps < self.iterations:
            steps += 1
            to_center = known @ shares - 0.5 * shares @ known @ shares
            pull = weights / np.maximum(np.sqrt(np.maximum(to_center, 0.0)), self.smoothing)
            before, shares = shares, pull / pull.sum()
            if np.abs(shares - before).max() <= self.tolerance:
                break
        return shares, steps
