# SPDX-License-Identifier: Apache-2.0
"""Keeps a result of the wrong shape from being half added: none of it can be used, and it says why.

NVFlare's own aggregation adds tensor by tensor and stops where shapes disagree, with what it added before still in the
sum. A result whose first tensor already refuses is left out as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nvflare_lazy.flare.weights import is_weight
from nvflare_lazy.tensors.byte_source import FailedSource
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor


def wrong_shape(weights: Mapping[str, Any], reference: Mapping[str, Any]) -> str | None:
    """Say which tensor has another shape than in the model, or None. What only one of them has is not looked at."""
    for name, value in weights.items():
        wanted = reference.get(name)
        if is_weight(value) and is_weight(wanted) and tuple(value.shape) != tuple(wanted.shape):  # type: ignore[union-attr]
            return f"{name!r} has the shape {list(value.shape)}, not {list(wanted.shape)}"  # type: ignore[union-attr]
    return None


def make_unusable(weights: dict[str, Any], error: Exception) -> None:
    """Let every tensor raise an error when it is read."""
    for name, value in weights.items():
        if isinstance(value, (np.ndarray, np.generic)):
            weights[name] = LazyArray(FailedSource(value.nbytes, error), value.dtype, value.shape)
        elif is_weight(value):
            weights[name] = LazyTensor(FailedSource(value.nbytes, error), value.dtype, value.shape)
