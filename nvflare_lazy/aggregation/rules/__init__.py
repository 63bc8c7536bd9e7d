# SPDX-License-Identifier: Apache-2.0
"""The aggregation rules, each with its paper, and `to_rule()`, which finds a rule by its name.

A rule decides how the contributions of a round become one model; the engine does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from nvflare_lazy.aggregation.rules.base import CoordinateRule, RoundContext, Rule
from nvflare_lazy.aggregation.rules.bulyan import Bulyan
from nvflare_lazy.aggregation.rules.clipped_mean import ClippedMean
from nvflare_lazy.aggregation.rules.coordinates import Median, TrimmedMean
from nvflare_lazy.aggregation.rules.geometric_median import GeometricMedian
from nvflare_lazy.aggregation.rules.krum import Krum, MultiKrum
from nvflare_lazy.aggregation.rules.mean import Mean

__all__ = [
    "Bulyan",
    "ClippedMean",
    "CoordinateRule",
    "GeometricMedian",
    "Krum",
    "Mean",
    "Median",
    "MultiKrum",
    "RoundContext",
    "Rule",
    "TrimmedMean",
    "rule_names",
    "to_rule",
]

_RULES: dict[str, type[Rule]] = {
    rule.name: rule for rule in (Mean, Median, TrimmedMean, Krum, MultiKrum, Bulyan, GeometricMedian, ClippedMean)
}


def rule_names() -> list[str]:
    """Return the names that `to_rule` accepts."""
    return [*_RULES]


def to_rule(rule: str | Mapping[str, Any] | Rule) -> Rule:
    """Return the rule that a caller or a configuration specifies.

    Args:
        rule: A name, a name with parameters, or a rule. A name that contains a dot is the path of a class to import.
            `byzantine` is accepted for `num_byzantine`.

    Example:
        >>> to_rule({"name": "trimmed_mean", "num_byzantine": 2})
        TrimmedMean(num_byzantine=2)
    """
    if isinstance(rule, Rule):
        return rule
    parameters = {"name": rule} if isinstance(rule, str) else dict(rule)
    name = parameters.pop("name", None)
    kind = _RULES.get(str(name)) or _imported(str(name))
    if "byzantine" in parameters and hasattr(kind, "num_byzantine"):
        parameters["num_byzantine"] = parameters.pop("byzantine")
    try:
        return kind(**parameters)
    except TypeError as error:
        raise ValueError(f"aggregation rule {name!r}: {str(error).partition(' ')[2]}") from None


def _imported(name: str) -> type[Rule]:
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(f"unknown aggregation rule {name!r}; available: {', '.join(_RULES)}")
    try:
        kind = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import aggregation rule {name!r}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Rule)):
        raise ValueError(f"invalid aggregation rule {name!r}: expected a subclass of nvflare_lazy.aggregation.Rule")
    return kind
