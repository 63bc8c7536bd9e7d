# SPDX-License-Identifier: Apache-2.0
"""Whether a client's result fits the global model it was asked to improve: names, shapes and types, without reading.

Checked before a result is taken into a round, by the aggregator, by the persistor, and for aggregators that would
stumble over it half way through.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvflare_lazy.flare.weights import geometry_of, is_weight

_MOST_NAMED = 3


def misfit(weights: Mapping[str, Any], reference: Mapping[str, Any]) -> str | None:
    """Say what keeps weights from fitting a model, or None if they do. Fewer tensors than the model has are fine.

    Args:
        weights: Tensors or arrays by name, lazy or not.
        reference: The model, in either form.
    """
    if not weights:
        return "it holds no tensors"
    strangers = [name for name in weights if name not in reference]
    if strangers:
        return f"the global model has no {_some(strangers)}"
    for name, value in weights.items():
        if not is_weight(value):
            return f"{name!r} is a {type(value).__name__}, neither a tensor nor an array"
        _, shape = geometry_of(value)
        _, wanted = geometry_of(reference[name])
        if shape != wanted:
            return f"{name!r} has the shape {list(shape)}; in the global model it is {list(wanted)}"
    return None


def wrong_shape(weights: Mapping[str, Any], reference: Mapping[str, Any]) -> str | None:
    """Say which tensor has another shape than in the model, or None. What only one of them has is not looked at.

    Other aggregators than ours may want what the model has not, but none can add what has another shape: NVFlare's own
    would find out with half of the result in its sum.
    """
    for name, value in weights.items():
        wanted = reference.get(name)
        if is_weight(value) and is_weight(wanted) and tuple(value.shape) != tuple(wanted.shape):  # type: ignore[union-attr]
            return f"{name!r} has the shape {list(value.shape)}, not {list(wanted.shape)}"  # type: ignore[union-attr]
    return None


def _some(names: list[str]) -> str:
    named = ", ".join(repr(name) for name in names[:_MOST_NAMED])
    return named if len(names) <= _MOST_NAMED else f"{named} and {len(names) - _MOST_NAMED} more"
