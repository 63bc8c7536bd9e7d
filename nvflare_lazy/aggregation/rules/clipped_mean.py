# SPDX-License-Identifier: Apache-2.0
"""The mean of updates with clipped norms and optional Gaussian noise: central differential privacy.

McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models, ICLR 2018,
https://arxiv.org/abs/1710.06963. Clipping bounds the influence of each contributor on the mean; noise in proportion to
that bound hides whether a contributor participated at all.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from nvflare_lazy.aggregation.reduction import LinearCombination
from nvflare_lazy.aggregation.rules.base import Rule, scale_weights
from nvflare_lazy.aggregation.statistics import SquaredNorms
from nvflare_lazy.errors import MissingReferenceError

if TYPE_CHECKING:
    import torch

    from nvflare_lazy.aggregation._engine.tile import Tile
    from nvflare_lazy.aggregation.reduction import Reduction
    from nvflare_lazy.aggregation.rules.base import RoundContext

# Each block of the model has its own random stream: the noise of an element depends on the seed and the position of the
# element, and not on its tile or thread.
_BLOCK = 16384


@dataclass(frozen=True)
class ClippedMean(Rule):
    """The weighted mean of updates that are scaled down to a maximum norm, plus noise.

    An update is the difference from the global model. If the contributors send whole models, pass the global model as
    `reference`. The norm is computed over all floating-point tensors together. Integers are averaged with the same
    scaling, without noise.

    Args:
        clip_norm: The maximum norm of an update.
        noise_multiplier: The standard deviation of the noise, in multiples of the largest influence of one contributor
            on the mean: `clip_norm` times the largest weight over the sum of the weights.
        seed: Seed of the noise. Default: from the operating system. Set it only in tests, because the noise can be
            removed by anyone with the seed.
    """

    clip_norm: float
    noise_multiplier: float = 0.0
    seed: int | None = field(default=None, repr=False)

    name: ClassVar[str] = "clipped_mean"
    uses_weights: ClassVar[bool] = True
    uses_reference: ClassVar[bool] = True
    requires_all_tensors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.clip_norm < math.inf:
            raise ValueError(f"clip_norm must be a positive number, not {self.clip_norm!r}")
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be zero or a positive number, not {self.noise_multiplier!r}")

    def describe(self) -> dict[str, Any]:
        """Return the name and the parameters, except the seed."""
        return {"name": self.name, "clip_norm": self.clip_norm, "noise_multiplier": self.noise_multiplier}

    def prepare(self, this_round: RoundContext) -> Reduction:
        is_full = this_round.params_type == "FULL"
        if is_full and not this_round.has_reference:
            raise MissingReferenceError(
                "clipped_mean clips differences from the global model, but the contributions are full models; pass "
                "the global model as reference, or send differences and set params_type='DIFF'"
            )
        norms = np.sqrt(this_round.compute_statistic(SquaredNorms(from_reference=is_full)))
        factors = self.clip_norm / np.maximum(norms, self.clip_norm)
        weights = scale_weights(this_round.weights)
        std = self.noise_multiplier * self.clip_norm * float(weights.max() / weights.sum())
        if std:
            # Values of single contributors would reveal data that the noise must hide.
            this_round.annotate(noise_std=std, seeded_by="caller" if self.seed is not None else "operating system")
        else:
            this_round.annotate(
                norms=dict(zip(this_round.names, norms.tolist(), strict=True)),
                clip_factors=dict(zip(this_round.names, factors.tolist(), strict=True)),
            )
        return LinearCombination(
            (weights * factors).tolist(),
            reference_weight=math.fsum(weights * (1.0 - factors)),
            has_reference=is_full,
            noise=GaussianNoise(std, self.seed) if std else None,
        )


class GaussianNoise:
    """Independent normal noise.

    Args:
        std: Standard deviation.
        seed: The seed. Default: from the operating system. The noise can be removed by anyone with the seed.
    """

    def __init__(self, std: float, seed: int | None = None) -> None:
        self.std = std
        entropy = secrets.randbits(128) if seed is None else seed
        self._key = np.random.SeedSequence(entropy).generate_state(2, np.uint64)

    def add_to(self, values: torch.Tensor, tile: Tile) -> None:
        """Add noise to the values of a tile."""
        array = values.numpy()
        start = tile.group.first + tile.start
        stop = start + tile.count
        for number in range(start // _BLOCK, -(-stop // _BLOCK)):
            counter = np.array([0, 0, number, tile.group.index], dtype=np.uint64)
            stream = np.random.Generator(np.random.Philox(key=self._key, counter=counter))
            begin = number * _BLOCK
            first, last = max(begin, start), min(begin + _BLOCK, stop)
            noise = stream.standard_normal(last - begin)[first - begin :]
            array[first - start : last - start] += self.std * noise
