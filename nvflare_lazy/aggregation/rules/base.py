# SPDX-License-Identifier: Apache-2.0
"""What a rule is: it says what it needs, looks at whole updates if it must, and names the reduction of their tiles.

The one thing to write for a new way of aggregating. The simplest kind, a function of the values that contributors
have for one element, is `CoordinateRule`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from nvflare_lazy.aggregation._engine.rounding import ROUNDING_BYTES, round_into
from nvflare_lazy.aggregation.reduction import Reduction
from nvflare_lazy.errors import AggregationDtypeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvflare_lazy.aggregation._engine.tile import TensorGroup, Tile
    from nvflare_lazy.aggregation.statistics import Statistic


class RoundContext(Protocol):
    """What a rule gets to see of a round before the tiles are reduced."""

    @property
    def names(self) -> Sequence[str]:
        """The contributors, in order."""

    @property
    def weights(self) -> Sequence[float]:
        """Their weights, as given by the caller."""

    @property
    def params_type(self) -> str:
        """Either "FULL", the updates are whole models, or "DIFF", they are differences from the global one."""

    @property
    def has_reference(self) -> bool:
        """Whether the caller gave the global model."""

    def compute_statistic(self, statistic: Statistic) -> Any:
        """Read all updates once and return what the statistic makes of them."""

    def annotate(self, **decisions: Any) -> None:
        """Put something into the report and the result's metadata: plain values, by name."""


class Rule(ABC):
    """A way to make one model of many.

    A subclass is a frozen dataclass whose fields are its parameters, or a plain class without any.

    Attributes:
        name: What it is called in a configuration; empty for a rule that is only given as an object.
        uses_weights: Whether the weights that contributors come with count. Robust rules do not let them: a weight is
            a claim of the contributor.
        uses_reference: Whether it reads the global model.
        requires_all_tensors: Whether each contributor must have all tensors. Otherwise, contributors without a tensor
            do not count for it. Robust rules require it, and so does `compute_statistic`.
    """

    name: ClassVar[str] = ""
    uses_weights: ClassVar[bool] = False
    uses_reference: ClassVar[bool] = False
    requires_all_tensors: ClassVar[bool] = False

    @property
    def min_contributors(self) -> int:
        """The least number of contributors with which the rule keeps its promise."""
        return 1

    @abstractmethod
    def prepare(self, this_round: RoundContext) -> Reduction:
        """Return how the tiles of a round are reduced.

        Args:
            this_round: The contributors, and access to statistics of their updates.
        """

    def describe(self) -> dict[str, Any]:
        """Return name and parameters, as plain values."""
        rule: object = self
        parameters = {field.name: getattr(rule, field.name) for field in fields(rule)} if is_dataclass(rule) else {}
        return {"name": self.name or type(self).__name__, **parameters}


class CoordinateRule(Rule):
    """A rule that looks at one element at a time: subclasses say how its values are combined.

    Attributes:
        workspace_factor: How much memory `combine` takes for itself, in multiples of its `values`.
    """

    workspace_factor: ClassVar[float] = 2.0

    @abstractmethod
    def combine(self, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Combine the values that contributors have for some elements.

        Args:
            values: Float64, a row for each contributor and a column for each element. May be written to.
            weights: Float64, one for each contributor.

        Returns:
            Float64, one for each element; rounded to the type of the tensors by the caller. Must not depend on the
            other columns.
        """

    def prepare(self, this_round: RoundContext) -> Reduction:
        return _Combination(self, this_round.weights)


class _Combination(Reduction):
    def __init__(self, rule: CoordinateRule, weights: Sequence[float]) -> None:
        self._rule = rule
        self._weights = weights

    def bytes_per_element(self, contributors: int) -> int:
        return int(8 * contributors * (1 + self._rule.workspace_factor)) + 8 + ROUNDING_BYTES

    def reduce(self, tile: Tile, out: torch.Tensor) -> None:
        members = tile.group.members
        values = tile.arena.take(torch.float64, len(members) * tile.count).view(len(members), tile.count)
        for index in range(len(members)):
            values[index].copy_(tile.read(index))
        weights = torch.tensor([self._weights[member] for member in members], dtype=torch.float64)
        combined = self._rule.combine(values, weights)
        if combined.shape != (tile.count,) or combined.dtype != torch.float64:
            raise TypeError(
                f"{type(self._rule).__name__}.combine must return {tile.count} float64 numbers, one for each column, "
                f"and not {tuple(combined.shape)} of {combined.dtype}"
            )
        round_into(out, combined, tile.arena)

    def check(self, group: TensorGroup) -> None:
        refuse_complex(group, self._rule)


def refuse_complex(group: TensorGroup, rule: Rule) -> None:
    """Raise for tensors whose elements have no order."""
    if group.dtype.is_complex:
        raise AggregationDtypeError(
            f"{group.names[0]!r} is {group.dtype}: complex numbers have no order to go by for "
            f"{rule.describe()['name']!r}; exclude the tensor, or use a mean"
        )
