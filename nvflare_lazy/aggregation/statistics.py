# SPDX-License-Identifier: Apache-2.0
"""Statistics of whole updates, such as their pairwise distances, computed in a pass before tiles are reduced.

Rules use them to compare contributors. Values are summed in blocks of a fixed size, and the blocks in a fixed order, so
the sums have the same bits for every tile size and number of threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nvflare_lazy.aggregation._engine.memory_plan import BLOCK

if TYPE_CHECKING:
    from nvflare_lazy.aggregation._engine.tile import Tile


class Statistic(ABC):
    """Sums over all floating-point elements of the updates.

    Attributes:
        name: Name of the pass in progress bars.
    """

    name: str

    @abstractmethod
    def num_sums(self, contributors: int) -> int:
        """Return the number of sums."""

    @abstractmethod
    def bytes_per_element(self, contributors: int) -> int:
        """Return the number of bytes that `accumulate` takes from the tile's arena for each element."""

    @abstractmethod
    def accumulate(self, tile: Tile, sums: torch.Tensor) -> None:
        """Write the sums of each block of a tile.

        Args:
            tile: The tile; its last block is padded with zeros.
            sums: Float64, one row for each sum and one column for each block of `BLOCK` elements.
        """

    @abstractmethod
    def result(self, totals: np.ndarray[Any, Any], contributors: int) -> Any:
        """Return the result for the rule, from the sums over all blocks."""


class SquaredNorms(Statistic):
    """The squared Euclidean norm of each update.

    The result is an array with one norm for each contributor. A NaN in an update makes its norm infinite.

    Args:
        from_reference: Subtract the global model from each update first.
    """

    name = "norms"

    def __init__(self, *, from_reference: bool = False) -> None:
        self._from_reference = from_reference

    def num_sums(self, contributors: int) -> int:
        return contributors

    def bytes_per_element(self, contributors: int) -> int:
        return 16

    def accumulate(self, tile: Tile, sums: torch.Tensor) -> None:
        padded = _padded(tile)
        values = tile.arena.take(torch.float64, padded)
        reference = tile.arena.take(torch.float64, padded)
        values[tile.count :] = 0.0
        if self._from_reference:
            reference[: tile.count].copy_(tile.read_reference())
            reference[tile.count :] = 0.0
        for index in range(len(tile.group.members)):
            values[: tile.count].copy_(tile.read(index))
            if self._from_reference:
                values.sub_(reference)
            _sum_squares(values, sums[index])

    def result(self, totals: np.ndarray[Any, Any], contributors: int) -> np.ndarray[Any, Any]:
        return _nan_as_infinity(totals)


class PairwiseDistances(Statistic):
    """The squared Euclidean distances between all pairs of updates.

    The result is a symmetric matrix. A NaN in an update makes its distances infinite.
    """

    name = "pairwise distances"

    def num_sums(self, contributors: int) -> int:
        return contributors * (contributors - 1) // 2

    def bytes_per_element(self, contributors: int) -> int:
        return 8 * contributors + 8

    def accumulate(self, tile: Tile, sums: torch.Tensor) -> None:
        count, padded = len(tile.group.members), _padded(tile)
        difference = tile.arena.take(torch.float64, padded)
        values = tile.arena.take(torch.float64, count * padded).view(count, padded)
        values[:, tile.count :] = 0.0
        pair = 0
        for index in range(count):
            values[index, : tile.count].copy_(tile.read(index))
            for other in range(index):
                torch.sub(values[index], values[other], out=difference)
                _sum_squares(difference, sums[pair])
                pair += 1

    def result(self, totals: np.ndarray[Any, Any], contributors: int) -> np.ndarray[Any, Any]:
        distances = np.zeros((contributors, contributors))
        distances[np.tril_indices(contributors, -1)] = _nan_as_infinity(totals)
        return distances + distances.T


def _padded(tile: Tile) -> int:
    return -(-tile.count // BLOCK) * BLOCK


def _sum_squares(values: torch.Tensor, sums: torch.Tensor) -> None:
    """Square values in place and sum them by blocks."""
    # A sum over a row of fixed length has the same bits for any number of rows; a longer sum would not.
    torch.sum(values.mul_(values).view(-1, BLOCK), dim=1, out=sums)


def _nan_as_infinity(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.where(np.isnan(values), np.inf, values)
