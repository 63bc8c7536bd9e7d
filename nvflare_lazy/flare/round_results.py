# SPDX-License-Identifier: Apache-2.0
"""The results of a round until they are combined: taken whole or not at all, weighed, and let go of at the end."""

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

from nvflare_lazy.errors import UnfitResultError
from nvflare_lazy.flare.fit import misfit
from nvflare_lazy.transport.failed import failure_of

CLIENT_NAME = "client_name"


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
            UnfitResultError: If it does not fit the global model, or the results before it.
        """
        client = client_of(model)
        failure = failure_of(model.params)
        if failure is not None:
            raise UnfitResultError(f"the result of {client} could not be received: {failure}") from failure
        if client in self.results:
            raise UnfitResultError(f"{client} has sent a second result for this round; the first one counts")
        if not isinstance(model.params, dict):
            raise UnfitResultError(f"the result of {client} holds no dictionary of tensors")
        if self.params_type is not None and model.params_type != self.params_type:
            raise UnfitResultError(
                f"{client} has sent {_kind(model.params_type)} and others {_kind(self.params_type)}: "
                "set the same params_transfer_type for all clients"
            )
        wrong = misfit(model.params, model.params if reference is None else reference)
        if wrong is not None:
            raise UnfitResultError(f"the result of {client} does not fit the global model: {wrong}")
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
