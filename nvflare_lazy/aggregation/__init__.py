# SPDX-License-Identifier: Apache-2.0
"""Many models become one, tile by tile: the engine, the rules the field knows, and the optimizers of a server.

The third step of the walk of a round: contributions lie on disk, and so does what comes out. Needs nothing of NVFlare.
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
