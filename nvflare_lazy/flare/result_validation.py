# SPDX-License-Identifier: Apache-2.0
"""Validation of the results that clients send, and the usable results of a round until they are aggregated.

`TensorOffload`, `LazyAggregator` and the persistor check a result's names, shapes and types here without reading it,
before an aggregator could fail with half of it in its sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.weighted_aggregation_helper import (
    WeightedAggregationHelper,
    filter_aggregatable_metrics,
)
from nvflare.app_common.app_constant import AppConstants

from nvflare_lazy.errors import ResultMismatchError
from nvflare_lazy.flare.weights import is_weight
from nvflare_lazy.tensors.entry import geometry_of
from nvflare_lazy.transport.failed import failure_of

CLIENT_NAME = "client_name"
_MAX_NAMES = 3


@dataclass(frozen=True)
class Result:
    """One client's result."""

    params: dict[str, Any]
    weight: float
    metrics: dict[str, Any] | None


@dataclass
class RoundResults:
    """What came in a round.

    Args:
        aggregation_weights: A factor for the weight of some clients.
    """

    aggregation_weights: Mapping[str, float] = field(default_factory=dict)
    params_type: ParamsType | None = None
    results: dict[str, Result] = field(default_factory=dict)

    def take(self, model: FLModel, reference: Mapping[str, Any] | None) -> str:
        """Take a result, or raise and take nothing of it.

        Args:
            model: The result.
            reference: The global model it has to fit, if there is one.

        Returns:
            The name of the client.

        Raises:
            ResultMismatchError: If it does not fit the global model, or the results before it.
        """
        client = client_of(model)
        failure = failure_of(model.params)
        if failure is not None:
            raise ResultMismatchError(f"the result of {client} could not be received: {failure}") from failure
        if client in self.results:
            raise ResultMismatchError(f"{client} has sent a second result for this round; the first one counts")
        if not isinstance(model.params, dict):
            raise ResultMismatchError(f"the result of {client} holds no dictionary of tensors")
        if self.params_type is not None and model.params_type != self.params_type:
            raise ResultMismatchError(
                f"{client} has sent {_kind(model.params_type)} and others {_kind(self.params_type)}: "
                "set the same params_transfer_type for all clients"
            )
        wrong = find_mismatch(model.params, model.params if reference is None else reference)
        if wrong is not None:
            raise ResultMismatchError(f"the result of {client} does not fit the global model: {wrong}")
        weight = self.aggregation_weights.get(client, 1.0) * steps_of(model)
        self.params_type = model.params_type
        self.results[client] = Result(model.params, weight, model.metrics)
        return client

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each client."""
        return {client: result.weight for client, result in self.results.items()}

    @property
    def params(self) -> dict[str, dict[str, Any]]:
        """The tensors of each client."""
        return {client: result.params for client, result in self.results.items()}

    def mean_metrics(self, took_part: list[str], warn: Callable[[str, str], None]) -> dict[str, Any] | None:
        """Return the weighted mean of the metrics of those who took part, as NVFlare's FedAvg does.

        One client without metrics leaves the round without; values that cannot be averaged are left out.
        """
        helper = WeightedAggregationHelper()
        warned: set[str] = set()
        for client in sorted(took_part):
            result = self.results[client]
            if result.metrics is None:
                return None
            numbers = filter_aggregatable_metrics(result.metrics, warn_skipped=warn, warned_metric_keys=warned)
            if numbers:
                helper.add(data=numbers, weight=result.weight, contributor_name=client, contribution_round=None)
        return helper.get_result() or None

    def clear(self) -> None:
        """Let go of the tensors: the messages they came in may be held for longer, so they are emptied."""
        for result in self.results.values():
            result.params.clear()
        self.results.clear()
        self.params_type = None


def client_of(model: FLModel) -> str:
    """Return who sent a result."""
    name = (model.meta or {}).get(CLIENT_NAME)
    return name if isinstance(name, str) and name else str(AppConstants.CLIENT_UNKNOWN)


def steps_of(model: FLModel) -> float:
    """Return how many steps a result says it was trained for, or 1 if it does not say so believably."""
    value = (model.meta or {}).get(FLMetaKey.NUM_STEPS_CURRENT_ROUND)
    if value is None or isinstance(value, bool):
        return 1.0
    try:
        steps = float(value)
    except (TypeError, ValueError, OverflowError):
        return 1.0
    return steps if math.isfinite(steps) and steps > 0 else 1.0


def _kind(params_type: ParamsType | None) -> str:
    return "nothing known" if params_type is None else f"params of type {params_type.value}"


def find_mismatch(weights: Mapping[str, Any], reference: Mapping[str, Any]) -> str | None:
    """Say what keeps weights from fitting a model, or None if they do. Fewer tensors than the model has are fine.

    Args:
        weights: Tensors or arrays by name, lazy or not.
        reference: The model, in either form.
    """
    if not weights:
        return "it holds no tensors"
    unexpected = [name for name in weights if name not in reference]
    if unexpected:
        return f"the global model has no {_some(unexpected)}"
    for name, value in weights.items():
        if not is_weight(value):
            return f"{name!r} is a {type(value).__name__}, neither a tensor nor an array"
        _, shape = geometry_of(value)
        _, wanted = geometry_of(reference[name])
        if shape != wanted:
            return f"{name!r} has the shape {list(shape)}; in the global model it is {list(wanted)}"
    return None


def find_shape_mismatch(weights: Mapping[str, Any], reference: Mapping[str, Any]) -> str | None:
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
    named = ", ".join(repr(name) for name in names[:_MAX_NAMES])
    return named if len(names) <= _MAX_NAMES else f"{named} and {len(names) - _MAX_NAMES} more"
