# SPDX-License-Identifier: Apache-2.0
"""An aggregator as a user of NVFlare and PyTorch writes it. Nothing in it is about where tensors are."""

from __future__ import annotations

import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator


class MedianAggregator(ModelAggregator):
    """Return the median of the clients' results, weight by weight."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[dict[str, torch.Tensor]] = []

    def accept_model(self, model: FLModel) -> None:
        self.results.append(model.params)

    def aggregate_model(self) -> FLModel:
        median = {}
        for name in self.results[0]:
            values = torch.stack([result[name] for result in self.results])
            median[name] = values.median(dim=0).values
        return FLModel(params=median, params_type=ParamsType.FULL)

    def reset_stats(self) -> None:
        self.results = []
