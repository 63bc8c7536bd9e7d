# SPDX-License-Identifier: Apache-2.0
"""`Subtree`: what a node in the middle of a tree of clients states about the aggregate that it passes upward.

`LazyAggregator` writes and reads it. The total weight is NVFlare's number of steps, which NVFlare's own aggregators
also use; this adds what a number of steps cannot express.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import ResultMismatchError

#: The key of the statement in the metadata of a result.
SUBTREE_KEY = "nvflare_lazy.subtree"
_RESULTS, _WEIGHTS = "results", "tensor_weights"
_MAX_RESULTS = 10**9


@dataclass(frozen=True)
class Subtree:
    """The results of clients that an aggregate consists of.

    Attributes:
        results: The number of results.
        tensor_weights: The weights of the tensors that only some of the clients sent. The other tensors have the weight
            of the aggregate.
    """

    results: int
    tensor_weights: Mapping[str, float] = field(default_factory=dict)

    def as_meta(self) -> dict[str, Any]:
        """Return the statement as metadata."""
        return {SUBTREE_KEY: {_RESULTS: self.results, _WEIGHTS: dict(self.tensor_weights)}}


def subtree_of(meta: Mapping[str, Any], who: str, tensors: Mapping[str, Any], max_weight: float) -> Subtree | None:
    """Return the statement about an aggregate, or None for the result of a client.

    Args:
        meta: The metadata of a result, which is untrusted.
        who: The sender, for messages.
        tensors: The tensors of the result, under the names that the sender uses.
        max_weight: The maximum weight of a tensor.

    Raises:
        ResultMismatchError: If the statement is invalid.
    """
    stated = meta.get(SUBTREE_KEY)
    if stated is None:
        return None
    if type(stated) is not dict or not stated.keys() <= {_RESULTS, _WEIGHTS}:
        raise ResultMismatchError(f"{SUBTREE_KEY} of {who} must be a dictionary of {_RESULTS} and {_WEIGHTS}")
    results, weights = stated.get(_RESULTS), stated.get(_WEIGHTS, {})
    if type(results) is not int or not 1 <= results <= _MAX_RESULTS:
        raise ResultMismatchError(f"{_RESULTS} of {who} must be an integer from 1 to {_MAX_RESULTS}")
    if type(weights) is not dict:
        raise ResultMismatchError(f"{_WEIGHTS} of {who} must be a dictionary, got {type(weights).__name__}")
    for name, weight in weights.items():
        if type(name) is not str or name not in tensors:
            raise ResultMismatchError(
                f"{_WEIGHTS} of {who} has a name that is not the name of a tensor: {quoted(name)}"
            )
        if type(weight) not in (int, float) or not (math.isfinite(weight) and 0 < weight <= max_weight):
            raise ResultMismatchError(
                f"{_WEIGHTS} of {who} for {quoted(name)} must be a number above 0, at most {max_weight:.0e}"
            )
    return Subtree(results, {name: float(weight) for name, weight in weights.items()})
