# SPDX-License-Identifier: Apache-2.0
"""`Rule`, the base class of aggregation rules, and `CoordinateRule`, for functions of one element's values.

A rule declares its requirements, computes statistics of whole updates if necessary, and returns the reduction of their
tiles. To add a way of aggregating, write a rule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from nvflare_lazy.aggregation._engine.rounding import ROUNDING_BYTES, round_into
from nvflare_lazy.aggregation.reduction import Reduction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nvflare_lazy.aggregation._engine.tile import Tile
    from nvflare_lazy.aggregation.statistics import Statistic


class RoundContext:
    """The view of a round that a rule has before the tiles are reduced.

    Attributes:
        names: The contributors, in order.
        weights: Their weights, as passed by the caller.
        params_type: "FULL" if the updates are full models, "DIFF" if they are differences from the global model.
        has_reference: Whether the caller passed the global model.
        decisions: The values that the rule has added to the report so far.
    """

    def __init__(
        self,
        rule: Rule,
        names: Sequence[str],
        weights: Sequence[float],
        *,
        params_type: str,
        has_reference: bool,
        compute: Callable[[Statistic], Any],
    ) -> None:
        self.names = names
        self.weights = weights
        self.params_type = params_type
        self.has_reference = has_reference
        self.decisions: dict[str, Any] = {}
        self._rule = rule
        self._compute = compute

    def compute_statistic(self, statistic: Statistic) -> Any:
        """Read all updates one time and return the result of the statistic."""
        if not self._rule.requires_all_tensors:
            raise TypeError(
                f"{type(self._rule).__name__} computes statistics, so it must set requires_all_tensors = True"
            )
        return self._compute(statistic)

    def annotate(self, **decisions: Any) -> None:
        """Add plain values, by name, to the report and the metadata of the result."""
        self.decisions.update(decisions)


def scale_weights(weights: Sequence[float] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return weights times the power of two that brings the largest between 1/2 and 1, so that sums are finite."""
    exact = np.asarray(weights, dtype=np.float64)
    scaled: np.ndarray[Any, Any] = np.ldexp(exact, -np.frexp(exact.max())[1])
    return scaled


class Rule(ABC):
    """A way to aggregate many models into one.

    A subclass is a frozen dataclass whose fields are its parameters, or a plain class without parameters.

    Attributes:
        name: The name in configurations; empty for a rule that is only passed as an object.
        uses_weights: Whether the rule uses the contributors' weights. Robust rules ignore them, because a weight is a
            claim of the contributor.
        uses_reference: Whether the rule reads the global model.
        requires_all_tensors: Whether each contributor must have all tensors. Otherwise, contributors without a tensor
            are ignored for that tensor. Robust rules require all tensors, and so does `compute_statistic`.
        uses_order: Whether the rule orders elements. Complex numbers have no order, so the rule rejects them.
    """

    name: ClassVar[str] = ""
    uses_weights: ClassVar[bool] = False
    uses_reference: ClassVar[bool] = False
    requires_all_tensors: ClassVar[bool] = False
    uses_order: ClassVar[bool] = False

    @property
    def min_contributors(self) -> int:
        """The minimum number of contributors for which the guarantees of the rule hold."""
        return 1

    @abstractmethod
    def prepare(self, this_round: RoundContext) -> Reduction:
        """Return the reduction for the tiles of a round.

        Args:
            this_round: The contributors, and access to statistics of their updates.
        """

    def describe(self) -> dict[str, Any]:
        """Return the name and the parameters, as plain values."""
        rule: object = self
        parameters = {field.name: getattr(rule, field.name) for field in fields(rule)} if is_dataclass(rule) else {}
        return {"name": self.name or type(self).__name__, **parameters}


@dataclass(frozen=True)
class ByzantineTolerantRule(Rule):
    """A rule that tolerates a given number of malicious (Byzantine) contributors."""

    num_byzantine: int = 1

    requires_all_tensors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if type(self.num_byzantine) is not int or self.num_byzantine < 0:
            raise ValueError(
                "num_byzantine (malicious contributors to tolerate) must be a non-negative integer, got "
                f"{self.num_byzantine!r}"
            )


class CoordinateRule(Rule):
    """A rule that combines the contributors' values of one element at a time.

    Attributes:
        workspace_factor: Memory that `combine` allocates, in multiples of its `values`.
    """

    uses_order: ClassVar[bool] = True
    workspace_factor: ClassVar[float] = 2.0

    @abstractmethod
    def combine(self, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Combine the contributors' values of some elements.

        Args:
            values: Float64, one row for each contributor and one column for each element. May be overwritten.
            weights: Float64, one for each contributor, scaled by a power of two to at most 1.

        Returns:
            Float64, one value for each element; the caller rounds it to the dtype of the tensors. The result of a
            column must not depend on other columns.
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
        weights = scale_weights([self._weights[member] for member in members])
        combined = self._rule.combine(values, torch.from_numpy(weights))
        if combined.shape != (tile.count,) or combined.dtype != torch.float64:
            raise TypeError(
                f"{type(self._rule).__name__}.combine must return {tile.count} float64 numbers, one for each column, "
                f"got {tuple(combined.shape)} of {combined.dtype}"
            )
        round_into(out, combined, tile.arena)
