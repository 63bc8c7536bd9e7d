# SPDX-License-Identifier: Apache-2.0
"""Reductions: the computation that a rule applies to every tile of the contributions.

A rule such as Krum compares whole updates first; its reduction then only copies the selected one. The engine runs the
reduction on every tile, in threads; a reduction keeps nothing from one tile to the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from nvflare_lazy.aggregation._engine.mean import MEAN_BYTES, Weights, mean_into, sum_into
from nvflare_lazy.aggregation._engine.rounding import round_into
from nvflare_lazy.errors import WeightError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvflare_lazy.aggregation._engine.tile import TensorGroup, Tile
    from nvflare_lazy.aggregation.rules.clipped_mean import GaussianNoise


class Reduction(ABC):
    """Reduces tiles. The result of an element must not depend on its tile or on its neighbors."""

    @abstractmethod
    def bytes_per_element(self, contributors: int) -> int:
        """Return the number of bytes that `reduce` takes from the tile's arena for each element.

        Args:
            contributors: Maximum number of contributors of a tile.
        """

    @abstractmethod
    def reduce(self, tile: Tile, out: torch.Tensor) -> None:
        """Reduce a tile.

        Args:
            tile: The contributors' elements.
            out: The tensor to write the result to, in the dtype of the tensors.
        """

    def check(self, group: TensorGroup) -> None:  # noqa: B027  # most have nothing to check
        """Raise if these tensors cannot be reduced."""

    def shares(self, members: Sequence[int]) -> tuple[float, ...] | None:
        """Return the share of each of these contributors in the result, with sum 1; None if it differs by element.

        Args:
            members: The contributors that have a tensor, as indices into the contributors of the round.
        """
        return None


class LinearCombination(Reduction):
    """The weighted mean, with weights that the rule chooses.

    If a contributor does not have a tensor, the weights of the others are renormalized.

    Args:
        weights: One for each contributor of the round; finite and not negative.
        reference_weight: The weight of the global model; for differences, of zero.
        has_reference: Whether the tiles contain the global model.
        noise: Noise to add to each floating-point number of the mean.
    """

    def __init__(
        self,
        weights: Sequence[float],
        *,
        reference_weight: float = 0.0,
        has_reference: bool = False,
        noise: GaussianNoise | None = None,
    ) -> None:
        self._all = tuple(map(float, weights))
        self._reference_weight = reference_weight
        self._has_reference = has_reference
        self._noise = noise
        self._known: dict[tuple[int, ...], Weights] = {}

    def bytes_per_element(self, contributors: int) -> int:
        return MEAN_BYTES if self._noise is None else MEAN_BYTES + 8

    def check(self, group: TensorGroup) -> None:
        if not self._reference_weight and not any(self._all[member] for member in group.members):
            raise WeightError(
                f"only contributors with weight 0 sent {group.names[0]!r}; exclude it or give them a weight"
            )

    def reduce(self, tile: Tile, out: torch.Tensor) -> None:
        members = len(tile.group.members)
        weights = self._weights(tile.group.members)

        def read_any(index: int) -> torch.Tensor:
            return tile.read(index) if index < members else tile.read_reference()

        read = read_any if self._has_reference else tile.read
        if self._noise is None or not tile.group.is_float:
            mean_into(out, read, weights, tile.arena)
        else:
            values = tile.arena.take(torch.float64, tile.count)
            sum_into(values, read, weights, tile.arena)
            self._noise.add_to(values, tile)
            round_into(out, values, tile.arena)

    def shares(self, members: Sequence[int]) -> tuple[float, ...] | None:
        if self._noise is not None:
            return None
        weights = self._weights(tuple(members))
        return tuple(factor / weights.total for factor in weights.factors[: len(members)])

    def _weights(self, members: tuple[int, ...]) -> Weights:
        weights = self._known.get(members)
        if weights is None:
            present = [self._all[member] for member in members]
            if self._has_reference:
                weights = Weights.of([*present, self._reference_weight])
            else:
                weights = Weights.of(present, of_zero=self._reference_weight)
            self._known[members] = weights
        return weights


class SelectContributor(Reduction):
    """The values of one contributor, bit for bit.

    Args:
        chosen: The contributor, as an index into the contributors of the round.
    """

    def __init__(self, chosen: int) -> None:
        self._chosen = chosen

    def bytes_per_element(self, contributors: int) -> int:
        return 0

    def reduce(self, tile: Tile, out: torch.Tensor) -> None:
        out.copy_(tile.read(tile.group.members.index(self._chosen)))

    def shares(self, members: Sequence[int]) -> tuple[float, ...]:
        return tuple(float(member == self._chosen) for member in members)
