# SPDX-License-Identifier: Apache-2.0
"""The report of a round: contributions used, with their weights, contributions skipped and why, rule decisions.

Returned to the caller for logs and decisions, and stored in short form in the metadata of the output file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvflare_lazy._text import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvflare_lazy.aggregation.reduction import Reduction
    from nvflare_lazy.aggregation.schema import RoundSchema

#: The metadata key under which a result has its provenance, as JSON.
METADATA_KEY = "nvflare_lazy.aggregation"


@dataclass(frozen=True)
class Provenance:
    """The provenance of a result.

    Attributes:
        rule: Name and parameters of the rule.
        params_type: "FULL" or "DIFF".
        contributors: The contributors whose contributions were used, in order.
        weights: The share of each of them in a tensor that all of them have, with sum 1, or less for a clipped mean;
            None if it differs from element to element.
        skipped: The contributors whose contributions were skipped, each with the error that explains why.
        decisions: Findings and decisions of the rule, by name: scores, norms, the scale of the noise.
    """

    rule: Mapping[str, Any]
    params_type: str
    contributors: tuple[str, ...]
    weights: Mapping[str, float] | None
    skipped: Mapping[str, Exception]
    decisions: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the provenance as plain values, for JSON."""
        plain: dict[str, Any] = to_json(
            {
                "rule": self.rule,
                "params_type": self.params_type,
                "contributors": self.contributors,
                "weights": self.weights,
                "skipped": {name: f"{type(error).__name__}: {error}" for name, error in self.skipped.items()},
                "decisions": self.decisions,
            }
        )
        return plain

    def as_metadata(self) -> dict[str, str]:
        """Return the provenance as metadata of a file."""
        return {METADATA_KEY: json.dumps(self.as_dict(), sort_keys=True, ensure_ascii=False, allow_nan=False)}


@dataclass(frozen=True)
class AggregationReport:
    """The report of a round.

    Attributes:
        provenance: The provenance of the result.
        partial: The tensors that some contributors do not have, each with the contributors that have it.
        excluded: Tensors that were excluded by name.
        tensors: Number of tensors of the result.
        nbytes: Number of bytes of the tensors.
        seconds: Duration of the aggregation.
        shares: For each set of contributors that have a tensor, the share of each of them in the result.
    """

    provenance: Provenance
    partial: Mapping[str, tuple[str, ...]]
    excluded: tuple[str, ...]
    tensors: int
    nbytes: int
    seconds: float
    shares: Mapping[tuple[str, ...], Mapping[str, float] | None] = field(repr=False)

    @property
    def contributors(self) -> tuple[str, ...]:
        """The contributors whose contributions were used, in order."""
        return self.provenance.contributors

    @property
    def skipped(self) -> Mapping[str, Exception]:
        """The contributors whose contributions were skipped, each with the error that explains why."""
        return self.provenance.skipped

    def weights_of(self, name: str) -> Mapping[str, float] | None:
        """Return the share of each contributor in one tensor; None if it differs from element to element.

        Args:
            name: The tensor.
        """
        return self.shares[self.partial.get(name, self.contributors)]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {
            **self.provenance.as_dict(),
            "partial": {name: [*holders] for name, holders in self.partial.items()},
            "excluded": [*self.excluded],
            "tensors": self.tensors,
            "nbytes": self.nbytes,
            "seconds": self.seconds,
        }


def shares_of(schema: RoundSchema, reduction: Reduction) -> dict[tuple[str, ...], Mapping[str, float] | None]:
    """Return the share of each contributor, for each set of contributors that have a tensor."""
    all_members = tuple(range(len(schema.names)))
    shares: dict[tuple[str, ...], Mapping[str, float] | None] = {}
    for members in {all_members, *(schema.holders[key] for key in schema.specs)}:
        names = tuple(schema.names[member] for member in members)
        values = reduction.shares(members)
        shares[names] = None if values is None else dict(zip(names, values, strict=True))
    return shares
