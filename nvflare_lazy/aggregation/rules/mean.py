# SPDX-License-Identifier: Apache-2.0
"""The weighted mean: federated averaging.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017, https://arxiv.org/abs/1602.05629. It trusts all contributors: a single one can set any result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nvflare_lazy.aggregation.reduction import LinearCombination
from nvflare_lazy.aggregation.rules.base import Rule

if TYPE_CHECKING:
    from nvflare_lazy.aggregation.reduction import Reduction
    from nvflare_lazy.aggregation.rules.base import RoundContext


@dataclass(frozen=True)
class Mean(Rule):
    """The mean, with the weights that the caller passes."""

    name: ClassVar[str] = "mean"
    uses_weights: ClassVar[bool] = True

    def prepare(self, this_round: RoundContext) -> Reduction:
        return LinearCombination(this_round.weights)
