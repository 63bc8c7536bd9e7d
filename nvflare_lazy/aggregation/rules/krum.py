# SPDX-License-Identifier: Apache-2.0
"""Krum and Multi-Krum: the updates that lie closest to the most others.

Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
NeurIPS 2017, https://arxiv.org/abs/1703.02757. Updates are compared as a whole, by their floating-point tensors;
weights do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from nvflare_lazy.aggregation.reduction import LinearCombination, Selection
from nvflare_lazy.aggregation.rules.base import Rule
from nvflare_lazy.aggregation.rules.coordinates import check_byzantine
from nvflare_lazy.aggregation.statistics import PairwiseDistances

if TYPE_CHECKING:
    from nvflare_lazy.aggregation.reduction import Reduction
    from nvflare_lazy.aggregation.rules.base import Round


def krum_scores(distances: np.ndarray[Any, Any], byzantine: int) -> np.ndarray[Any, Any]:
    """Return for each update the sum of the squared distances to its closest n - f - 2 others, at least to one.

    Args:
        distances: Squared distances of all pairs.
        byzantine: The f of the paper.
    """
    count = len(distances)
    closest = max(count - byzantine - 2, 1)
    to_others = np.sort(distances[~np.eye(count, dtype=bool)].reshape(count, count - 1), axis=1)
    scores: np.ndarray[Any, Any] = to_others[:, :closest].sum(axis=1)
    return scores


@dataclass(frozen=True)
class Krum(Rule):
    """The one update with the best score, unchanged; of equal ones, the first by name.

    Args:
        byzantine: How many contributors may lie.
    """

    byzantine: int = 1

    name: ClassVar[str] = "krum"
    whole_updates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_byzantine(self.byzantine)

    @property
    def needs(self) -> int:
        return 2 * self.byzantine + 3

    def prepare(self, this_round: Round) -> Reduction:
        scores = krum_scores(this_round.gather(PairwiseDistances()), self.byzantine)
        chosen = int(np.argmin(scores))
        this_round.note(scores=dict(zip(this_round.names, scores.tolist(), strict=True)))
        this_round.note(selected=[this_round.names[chosen]])
        return Selection(chosen)


@dataclass(frozen=True)
class MultiKrum(Rule):
    """The mean of the updates with the best scores.

    Args:
        byzantine: How many contributors may lie.
        keep: How many updates are averaged, at most n - f - 2 of n; that many, if not given.
    """

    byzantine: int = 1
    keep: int | None = None

    name: ClassVar[str] = "multi_krum"
    whole_updates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_byzantine(self.byzantine)
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep is how many updates are averaged, at least 1, and not {self.keep!r}")

    @property
    def needs(self) -> int:
        return max(2 * self.byzantine + 3, (self.keep or 1) + self.byzantine + 2)

    def prepare(self, this_round: Round) -> Reduction:
        scores = krum_scores(this_round.gather(PairwiseDistances()), self.byzantine)
        keep = self.keep or len(scores) - self.byzantine - 2
        chosen = sorted(np.argsort(scores, kind="stable")[:keep].tolist())
        this_round.note(scores=dict(zip(this_round.names, scores.tolist(), strict=True)))
        this_round.note(selected=[this_round.names[index] for index in chosen])
        return LinearCombination([float(index in chosen) for index in range(len(scores))])
