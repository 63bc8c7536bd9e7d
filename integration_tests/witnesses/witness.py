# SPDX-License-Identifier: Apache-2.0
"""A user's components without any use of this package: they record the received values. Travel in a job's `custom`."""

from __future__ import annotations

import json
import os

from nvflare.apis.analytix import AnalyticsData
from nvflare.apis.dxo import from_shareable
from nvflare.apis.filter import Filter
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.widgets.streaming import AnalyticsReceiver


def note(**content):
    with open(os.environ["WITNESS"], "a") as file:
        file.write(json.dumps(content) + "\n")


class ResultWitness(Filter):
    """Writes down the types of a result's tensors, as `type` tells them."""

    def process(self, shareable, fl_ctx):
        note(types=sorted({type(value).__name__ for value in from_shareable(shareable).data.values()}))
        return shareable


class MetricsWitness(AnalyticsReceiver):
    """Writes down the metrics it gets, as receivers for TensorBoard and the like do."""

    def initialize(self, fl_ctx):
        pass

    def save(self, fl_ctx, shareable, record_origin):
        data = AnalyticsData.from_dxo(from_shareable(shareable))
        note(tag=data.tag, value=data.value, step=data.step, origin=record_origin)

    def finalize(self, fl_ctx):
        pass


class PlainAggregator(ModelAggregator):
    """Averages its collected values at the end of a round, in the usual way, without expecting that reading fails."""

    def __init__(self):
        super().__init__()
        self.results = []

    def accept_model(self, model):
        self.results.append((model.meta["NUM_STEPS_CURRENT_ROUND"], model.params))

    def aggregate_model(self):
        total = sum(steps for steps, _ in self.results)
        params = {
            name: sum(params[name] * (steps / total) for steps, params in self.results) for name in self.results[0][1]
        }
        return FLModel(params=params, params_type=ParamsType.FULL)

    def reset_stats(self):
        self.results = []
