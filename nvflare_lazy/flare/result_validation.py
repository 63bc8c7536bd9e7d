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

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.fl_constant import FLContextKey, FLMetaKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.weighted_aggregation_helper import (
    WeightedAggregationHelper,
    filter_aggregatable_metrics,
)
from nvflare.app_common.app_constant import AppConstants

from nvflare_lazy.errors import ResultMismatchError
from nvflare_lazy.flare.weights import is_weight
from nvflare_lazy.transport.failed import failure_of

CLIENT_NAME = "client_name"
_MODEL_KINDS = (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF)
_MAX_NAMES = 3


def model_result(fl_ctx: FLContext) -> DXO | None:
    """Return the result that NVFlare is processing, or None if it has no plain tensors."""
    result = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
    if not isinstance(result, Shareable) or result.get_return_code() != ReturnCode.OK:
        return None
    try:
        dxo = from_shareable(result)
    except ValueError:
        return None
    if dxo.data_kind not in _MODEL_KINDS or dxo.get_meta_prop(MetaKey.PROCESSED_ALGORITHM) is not None:
        return None
    return dxo if isinstance(dxo.data, dict) else None


def find_failure(client: str, params: Mapping[str, Any], model: Mapping[str, Any] | None) -> Exception | None:
    """Return why no aggregator can use a result: it was not received, or a shape differs from the global model."""
    failure = failure_of(params)
    mismatch = find_shape_mismatch(params, model) if failure is None and model is not None else None
    if mismatch is not None:
        failure = ResultMismatchError(f"the result of {client} does not match the global model: {mismatch}")
    return failure


@dataclass(frozen=True)
class Result:
    """The result of one client."""

    params: dict[str, Any]
    weight: float
    metrics: dict[str, Any] | None


@dataclass
class RoundResults:
    """The usable results of a round, until they are aggregated. Factors multiply the weights of some clients."""

    aggregation_weights: Mapping[str, float] = field(default_factory=dict)
    params_type: ParamsType | None = None
    results: dict[str, Result] = field(default_factory=dict)

    def take(self, model: FLModel, reference: Mapping[str, Any] | None) -> None:
        """Add a result to the round, all-or-nothing.

        Raises:
            ResultMismatchError: If the result does not match the global model, if that is known, or earlier results.
        """
        client = client_of(model)
        failure = failure_of(model.params)
        if failure is not None:
            raise ResultMismatchError(f"the result of {client} could not be received: {failure}") from failure
        if client in self.results:
            raise ResultMismatchError(f"{client} sent a second result for this round; the first one is used")
        if not isinstance(model.params, dict):
            raise ResultMismatchError(f"the result of {client} is not a dictionary of tensors")
        if self.params_type is not None and model.params_type != self.params_type:
            raise ResultMismatchError(
                f"{client} sent {_kind(model.params_type)}, other clients sent {_kind(self.params_type)}; "
                "set the same params_transfer_type for all clients"
            )
        mismatch = find_mismatch(model.params, model.params if reference is None else reference)
        if mismatch is not None:
            raise ResultMismatchError(f"the result of {client} does not match the global model: {mismatch}")
        weight = self.aggregation_weights.get(client, 1.0) * steps_of(model)
        self.params_type = model.params_type
        self.results[client] = Result(model.params, weight, model.metrics)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each client."""
        return {client: result.weight for client, result in self.results.items()}

    @property
    def params(self) -> dict[str, dict[str, Any]]:
        """The tensors of each client."""
        return {client: result.params for client, result in self.results.items()}

    def mean_metrics(self, clients: list[str], warn: Callable[[str, str], None]) -> dict[str, Any] | None:
        """Return the weighted mean of the metrics of these clients, as NVFlare's FedAvg does.

        If one client has no metrics, there is no mean. Values that cannot be averaged are skipped.
        """
        helper = WeightedAggregationHelper()
        warned: set[str] = set()
        for client in sorted(clients):
            result = self.results[client]
            if result.metrics is None:
                return None
            numbers = filter_aggregatable_metrics(result.metrics, warn_skipped=warn, warned_metric_keys=warned)
            if numbers:
                helper.add(data=numbers, weight=result.weight, contributor_name=client, contribution_round=None)
        return helper.get_result() or None

    def clear(self) -> None:
        """Release the tensors. NVFlare may keep the messages for longer, so their dictionaries are emptied."""
        for result in self.results.values():
            result.params.clear()
        self.results.clear()
        self.params_type = None


def client_of(model: FLModel) -> str:
    """Return the client that sent a result."""
    name = (model.meta or {}).get(CLIENT_NAME)
    return name if isinstance(name, str) and name else str(AppConstants.CLIENT_UNKNOWN)


def steps_of(model: FLModel) -> float:
    """Return the number of training steps that a result reports, or 1 if it is missing or invalid."""
    value = (model.meta or {}).get(FLMetaKey.NUM_STEPS_CURRENT_ROUND)
    if value is None or isinstance(value, bool):
        return 1.0
    try:
        steps = float(value)
    except (TypeError, ValueError, OverflowError):
        return 1.0
    return steps if math.isfinite(steps) and steps > 0 else 1.0


def _kind(params_type: ParamsType | None) -> str:
    return "params of an unknown type" if params_type is None else f"params of type {params_type.value}"


def find_mismatch(weights: Mapping[str, Any], reference: Mapping[str, Any]) -> str | None:
    """Describe how weights differ from a model in names and shapes, or return None. Tensors may be missing."""
    if not weights:
        return "it has no tensors"
    unexpected = [name for name in weights if name not in reference]
    if unexpected:
        return f"the global model has no {_listed(unexpected)}"
    for name, value in weights.items():
        if not is_weight(value):
            return f"{name!r} must be a tensor or an array, got {type(value).__name__}"
        shape, expected = tuple(value.shape), tuple(reference[name].shape)
        if shape != expected:
            return f"{name!r} has shape {list(shape)}, expected {list(expected)}"
    return None


def find_shape_mismatch(weights: Mapping[str, Any], reference: Mapping[str, Any]) -> str | None:
    """Describe the first tensor whose shape differs from the model, or return None.

    Other aggregators may use tensors that the model does not have, but none can add tensors of different shapes:
    NVFlare's would fail with half of the result in its sum.
    """
    for name, value in weights.items():
        expected: Any = reference.get(name)
        if is_weight(value) and is_weight(expected) and tuple(value.shape) != tuple(expected.shape):
            return f"{name!r} has shape {list(value.shape)}, expected {list(expected.shape)}"
    return None


def _listed(names: list[str]) -> str:
    named = ", ".join(repr(name) for name in names[:_MAX_NAMES])
    return named if len(names) <= _MAX_NAMES else f"{named} and {len(names) - _MAX_NAMES} more"
