# SPDX-License-Identifier: Apache-2.0
"""The weighted mean: federated averaging.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017, https://arxiv.org/abs/1602.05629. It trusts everybody: one contributor can move it anywhere.
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
    """The mean, weighted by what the caller gives."""

    name: ClassVar[str] = "mean"
    uses_weights: ClassVar[bool] = True

    def prepare(self, this_round: RoundContext) -> Reduction:
        return LinearCombination(this_round.weights)
