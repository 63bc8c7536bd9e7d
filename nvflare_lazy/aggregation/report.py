# SPDX-License-Identifier: Apache-2.0
"""What became of a round: who took part with how much weight, who did not and why, and what the rule decided.

Goes to whoever called, for logs and decisions, and in short into the metadata of the file that was written.
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

#: Under this name, the metadata of a result says in JSON how it was made.
METADATA_KEY = "nvflare_lazy.aggregation"


@dataclass(frozen=True)
class Provenance:
    """How a result was made.

    Attributes:
        rule: Name and parameters of the rule.
        params_type: "FULL" or "DIFF".
        contributors: Who took part, in order.
        weights: How much each of them counts in a tensor that all of them have, summing up to one; less for a clipped
            mean; None if that differs from element to element.
        skipped: Who did not take part, and the error that says why.
        decisions: What the rule found and decided, by name: scores, norms, the scale of the noise.
    """

    rule: Mapping[str, Any]
    params_type: str
    contributors: tuple[str, ...]
    weights: Mapping[str, float] | None
    skipped: Mapping[str, Exception]
    decisions: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
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
        """Return it as metadata of a file."""
        return {METADATA_KEY: json.dumps(self.as_dict(), sort_keys=True, ensure_ascii=False, allow_nan=False)}


@dataclass(frozen=True)
class AggregationReport:
    """What became of a round.

    Attributes:
        provenance: How the result was made.
        partial: The tensors that not all of those who took part have, and who has them.
        excluded: Tensors that were excluded by name.
        tensors: How many tensors the result has.
        nbytes: How many bytes these have.
        seconds: How long it took.
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
        """Who took part, in order."""
        return self.provenance.contributors

    @property
    def skipped(self) -> Mapping[str, Exception]:
        """Who did not take part, and the error that says why."""
        return self.provenance.skipped

    def weights_of(self, name: str) -> Mapping[str, float] | None:
        """Return how much each contributor counts in one tensor; None if that differs from element to element.

        Args:
            name: The tensor.
        """
        return self.shares[self.partial.get(name, self.contributors)]

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        return {
            **self.provenance.as_dict(),
            "partial": {name: [*holders] for name, holders in self.partial.items()},
            "excluded": [*self.excluded],
            "tensors": self.tensors,
            "nbytes": self.nbytes,
            "seconds": self.seconds,
        }


def shares_of(schema: RoundSchema, reduction: Reduction) -> dict[tuple[str, ...], Mapping[str, float] | None]:
    """Return for each set of contributors that has a tensor how much each of them counts there."""
    everybody = tuple(range(len(schema.names)))
    shares: dict[tuple[str, ...], Mapping[str, float] | None] = {}
    for members in {everybody, *(schema.holders[key] for key in schema.specs)}:
        names = tuple(schema.names[member] for member in members)
        values = reduction.shares(members)
        shares[names] = None if values is None else dict(zip(names, values, strict=True))
    return shares
