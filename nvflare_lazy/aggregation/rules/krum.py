# SPDX-License-Identifier: Apache-2.0
"""Krum and Multi-Krum: select the updates that are closest to most others.

Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
NeurIPS 2017, https://arxiv.org/abs/1703.02757. Whole updates are compared, by their floating-point tensors; weights are
ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from nvflare_lazy.aggregation.reduction import LinearCombination, SelectContributor
from nvflare_lazy.aggregation.rules.base import ByzantineTolerantRule
from nvflare_lazy.aggregation.statistics import PairwiseDistances

if TYPE_CHECKING:
    from nvflare_lazy.aggregation.reduction import Reduction
    from nvflare_lazy.aggregation.rules.base import RoundContext


def krum_scores(distances: np.ndarray[Any, Any], num_byzantine: int) -> np.ndarray[Any, Any]:
    """Return for each update the sum of the squared distances to its n - f - 2 (at least 1) closest updates."""
    count = len(distances)
    closest = max(count - num_byzantine - 2, 1)
    to_others = np.sort(distances[~np.eye(count, dtype=bool)].reshape(count, count - 1), axis=1)
    scores: np.ndarray[Any, Any] = to_others[:, :closest].sum(axis=1)
    return scores


@dataclass(frozen=True)
class Krum(ByzantineTolerantRule):
    """The update with the lowest score, unchanged; in a tie, the first by name.

    Args:
        num_byzantine: Number of malicious (Byzantine) contributors to tolerate.
    """

    name: ClassVar[str] = "krum"

    @property
    def min_contributors(self) -> int:
        return 2 * self.num_byzantine + 3

    def prepare(self, this_round: RoundContext) -> Reduction:
        scores = krum_scores(this_round.compute_statistic(PairwiseDistances()), self.num_byzantine)
        chosen = int(np.argmin(scores))
        this_round.annotate(scores=dict(zip(this_round.names, scores.tolist(), strict=True)))
        this_round.annotate(selected=[this_round.names[chosen]])
        return SelectContributor(chosen)


@dataclass(frozen=True)
class MultiKrum(ByzantineTolerantRule):
    """The mean of the updates with the lowest scores.

    Args:
        num_byzantine: Number of malicious (Byzantine) contributors to tolerate.
        num_selected: Number of updates to average, at most n - f - 2 of n. Default: n - f - 2.
    """

    num_selected: int | None = None

    name: ClassVar[str] = "multi_krum"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_selected is not None and self.num_selected < 1:
            raise ValueError(
                f"num_selected (number of updates to average) must be at least 1, not {self.num_selected!r}"
            )

    @property
    def min_contributors(self) -> int:
        return max(2 * self.num_byzantine + 3, (self.num_selected or 1) + self.num_byzantine + 2)

    def prepare(self, this_round: RoundContext) -> Reduction:
        scores = krum_scores(this_round.compute_statistic(PairwiseDistances()), self.num_byzantine)
        num_selected = self.num_selected or len(scores) - self.num_byzantine - 2
        chosen = sorted(np.argsort(scores, kind="stable")[:num_selected].tolist())
        this_round.annotate(scores=dict(zip(this_round.names, scores.tolist(), strict=True)))
        this_round.annotate(selected=[this_round.names[index] for index in chosen])
        return LinearCombination([float(index in chosen) for index in range(len(scores))])
