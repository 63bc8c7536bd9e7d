# SPDX-License-Identifier: Apache-2.0
"""Gaussian noise for differential privacy, the same for an element whatever tile it is in and whichever thread adds it.

Added to the mean of clipped updates, before that is rounded. Each block of the model has a random stream of its own,
so the noise depends on the seed and the place and on nothing else.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from nvflare_lazy.aggregation.tile import Tile

_BLOCK = 16384


class GaussianNoise:
    """Independent normal noise.

    Args:
        std: Its standard deviation.
        seed: Where to begin; from the operating system, if not given. Who knows it can take the noise away.
    """

    def __init__(self, std: float, seed: int | None = None) -> None:
        self.std = std
        entropy = secrets.randbits(128) if seed is None else seed
        self._key = np.random.SeedSequence(entropy).generate_state(2, np.uint64)

    def add_to(self, values: torch.Tensor, tile: Tile) -> None:
        """Add the noise of a tile to its values."""
        array = values.numpy()
        stop = tile.start + tile.count
        for number in range(tile.start // _BLOCK, -(-stop // _BLOCK)):
            counter = np.array([0, 0, number, tile.group.index], dtype=np.uint64)
            stream = np.random.Generator(np.random.Philox(key=self._key, counter=counter))
            begin = number * _BLOCK
            first, last = max(begin, tile.start), min(begin + _BLOCK, stop)
            noise = stream.standard_normal(last - begin)[first - begin :]
            array[first - tile.start : last - tile.start] += self.std * noise
