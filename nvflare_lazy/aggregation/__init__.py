# SPDX-License-Identifier: Apache-2.0
"""Aggregation of many models into one, tile by tile: rules, the engine behind them, and server optimizers.

The inputs are on disk, and so is the result. Nothing here depends on NVFlare.
"""

from nvflare_lazy.aggregation._engine.tile_pool import Progress
from nvflare_lazy.aggregation._round_execution import AggregationResult
from nvflare_lazy.aggregation.api import Aggregation, ParamsType, aggregate
from nvflare_lazy.aggregation.reduction import LinearCombination, Reduction, SelectContributor
from nvflare_lazy.aggregation.report import METADATA_KEY, AggregationReport, Provenance
from nvflare_lazy.aggregation.rules import (
    Bulyan,
    ClippedMean,
    CoordinateRule,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    MultiKrum,
    RoundContext,
    Rule,
    TrimmedMean,
    rule_names,
    to_rule,
)
from nvflare_lazy.aggregation.server_optimizers import (
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
    ServerOptimizer,
    to_optimizer,
)
from nvflare_lazy.aggregation.statistics import PairwiseDistances, SquaredNorms, Statistic

__all__ = [
    "METADATA_KEY",
    "Aggregation",
    "AggregationReport",
    "AggregationResult",
    "Bulyan",
    "ClippedMean",
    "CoordinateRule",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedYogi",
    "GeometricMedian",
    "Krum",
    "LinearCombination",
    "Mean",
    "Median",
    "MultiKrum",
    "PairwiseDistances",
    "ParamsType",
    "Progress",
    "Provenance",
    "Reduction",
    "RoundContext",
    "Rule",
    "SelectContributor",
    "ServerOptimizer",
    "SquaredNorms",
    "Statistic",
    "TrimmedMean",
    "aggregate",
    "rule_names",
    "to_optimizer",
    "to_rule",
]
