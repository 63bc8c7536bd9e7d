# SPDX-License-Identifier: Apache-2.0
"""`aggregate()`: contributions in, one model on disk out, by a rule and within a memory budget.

The third step of the walk of a round. Who fails while being read is left out whole and the rest is done again, which is
simple, and right whatever the rule; the result appears only when all of it is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from nvflare_lazy._text import parse_size
from nvflare_lazy.aggregation._engine.tile import NonFinitePolicy
from nvflare_lazy.aggregation._engine.tile_pool import PassMonitor, Progress
from nvflare_lazy.aggregation._round_execution import AggregationResult, RoundExecution
from nvflare_lazy.aggregation.rules import Rule, to_rule
from nvflare_lazy.aggregation.schema import MismatchPolicy

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from nvflare_lazy.aggregation.report import AggregationReport
    from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict

#: What contributors send: whole models, or differences from the global model.
ParamsType = Literal["FULL", "DIFF"]


@dataclass(frozen=True)
class Aggregation:
    """How rounds are aggregated: made once, from a configuration perhaps, and run for each round.

    | to | set |
    |---|---|
    | tolerate malicious contributors | `rule="trimmed_mean"`, or `rule={"name": "krum", "num_byzantine": 2}` |
    | use less memory, or more | `memory_budget="64MiB"` |
    | leave some tensors out | `exclude="running_(mean|var)$"` |
    | skip contributions that do not match | `on_mismatch="skip"`, `on_non_finite="skip"` |
    | get several files | `max_shard_size="5GB"` |

    Args:
        rule: The rule; a name, a name with parameters, or an object.
        params_type: "FULL" if contributors send whole models, "DIFF" if they send differences from the global model.
        memory_budget: Bytes of memory for tiles, for example "256MiB".
        threads: How many threads; one for each core, if not given.
        tile_size: Bytes of a tile in its type at most, for example "1MiB"; what runs fastest, if not given.
        exclude: A regular expression: tensors with such a name are in no result.
        on_mismatch: What to do about a contribution whose names, shapes or dtypes differ from what most contributors,
            or the global model, have: raise ("error"), or "skip" it.
        on_non_finite: What to do about NaN and infinity in a floating-point tensor of a contribution: "keep" it and
            compute with it, "skip" that contribution, or raise "error".
        min_contributors: With fewer left, raise.
        max_shard_size: Split a larger result into files of at most so many bytes.
        fsync: Whether the result must survive a power failure. Where something else sees to that later, without is
            faster.

    Example:
        >>> aggregation = Aggregation(rule="median", on_mismatch="skip")
        >>> result = aggregation.run({"site-1": update_1, "site-2": update_2, "site-3": update_3}, "global.safetensors")
        >>> result.report.skipped
    """

    rule: str | Mapping[str, Any] | Rule = "mean"
    params_type: ParamsType = "FULL"
    memory_budget: int | str = "256MiB"
    threads: int | None = None
    tile_size: int | str | None = None
    exclude: str | None = None
    on_mismatch: MismatchPolicy = "error"
    on_non_finite: NonFinitePolicy = "keep"
    min_contributors: int = 1
    max_shard_size: int | str | None = None
    fsync: bool = True

    def __post_init__(self) -> None:
        to_rule(self.rule)
        for name, choices in (
            ("params_type", ParamsType),
            ("on_mismatch", MismatchPolicy),
            ("on_non_finite", NonFinitePolicy),
        ):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name} must be one of {get_args(choices)}, not {getattr(self, name)!r}")
        for name in ("threads", "min_contributors"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value!r}")
        for name in ("memory_budget", "tile_size", "max_shard_size"):
            if getattr(self, name) is not None:
                parse_size(getattr(self, name))
        if self.exclude is not None:
            try:
                re.compile(self.exclude)
            except re.error as error:
                raise ValueError(f"exclude is no regular expression: {self.exclude!r}: {error}") from None

    def run(
        self,
        contributions: Mapping[str, Mapping[str, Any]],
        out: str | os.PathLike[str],
        *,
        weights: Mapping[str, float] | None = None,
        reference: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        progress: Callable[[Progress], object] | None = None,
        should_cancel: Callable[[], bool] | None = None,
        on_contribution_done: Callable[[str], object] | None = None,
    ) -> AggregationResult:
        """Aggregate a round.

        Args:
            contributions: For each contributor, tensors or arrays by name, lazy or not.
            out: The file to write; in a directory, the name is `model.safetensors`.
            weights: Weights by contributor, in proportion to which they count; one each, if not given.
            reference: The global model. If it is given, its names and shapes are right, whatever contributors say.
            metadata: Text to store in the result beside its provenance.
            progress: Called now and then in this thread.
            should_cancel: Called repeatedly; if it returns true, the aggregation stops and what was written is removed.
                For example, the `is_set` of an event.
            on_contribution_done: Called once with the name of each contributor, as soon as its contribution is no
                longer read.

        Raises:
            AggregationError: There is no result; `errors.py` draws the tree.
        """
        return RoundExecution(
            self,
            to_rule(self.rule),
            contributions,
            weights=weights,
            reference=reference,
            monitor=PassMonitor(progress, should_cancel),
            on_contribution_done=on_contribution_done,
        ).run(out, metadata or {})


def aggregate(
    contributions: Mapping[str, Mapping[str, Any]],
    out: str | os.PathLike[str],
    rule: str | Mapping[str, Any] | Rule = "mean",
    weights: Mapping[str, float] | None = None,
    memory_budget: int | str = "256MiB",
    *,
    params_type: ParamsType = "FULL",
    threads: int | None = None,
    tile_size: int | str | None = None,
    exclude: str | None = None,
    on_mismatch: MismatchPolicy = "error",
    on_non_finite: NonFinitePolicy = "keep",
    min_contributors: int = 1,
    max_shard_size: int | str | None = None,
    fsync: bool = True,
    reference: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[Progress], object] | None = None,
    should_cancel: Callable[[], bool] | None = None,
    on_contribution_done: Callable[[str], object] | None = None,
    on_report: Callable[[AggregationReport], object] | None = None,
) -> LazyTensorDict:
    """Make one model of many, tile by tile, within a memory budget.

    Contributors count in the order of their names, values are summed in float64 and rounded once: the same
    contributions give the same bits. A contribution that cannot be read is left out whole.

    Args:
        contributions: For each contributor, tensors or arrays by name, lazy or not.
        out: The safetensors file to write; in a directory, the name is `model.safetensors`.
        rule: The rule, by name, by name and parameters, or as an object.
        weights: Weights by contributor; one each, if not given.
        memory_budget: Bytes of memory for tiles.
        params_type: See `Aggregation`, as for all arguments down to `fsync`.
        threads: How many threads.
        tile_size: Bytes of a tile at most.
        exclude: A regular expression: tensors with such a name are not in the result.
        on_mismatch: "error" or "skip".
        on_non_finite: "keep", "skip" or "error".
        min_contributors: With fewer left, raise.
        max_shard_size: Split a larger result into files of at most so many bytes.
        fsync: Whether the result must survive a power failure.
        reference: The global model; see `Aggregation.run`, as for all that follow.
        metadata: Text to store in the result.
        progress: Called now and then.
        should_cancel: Asked now and then whether to stop.
        on_contribution_done: Called with each contributor's name once its contribution is not read any more.
        on_report: Called with who took part, who did not and why, and how much each counted.

    Returns:
        The new model, opened from the file.

    Example:
        >>> contributions = {"site-1": nvflare_lazy.open("1.safetensors"), "site-2": model.state_dict()}
        >>> mean = nvflare_lazy.aggregate(contributions, out="mean.safetensors")
    """
    aggregation = Aggregation(
        rule,
        params_type,
        memory_budget,
        threads,
        tile_size,
        exclude,
        on_mismatch,
        on_non_finite,
        min_contributors,
        max_shard_size,
        fsync,
    )
    result = aggregation.run(
        contributions,
        out,
        weights=weights,
        reference=reference,
        metadata=metadata,
        progress=progress,
        should_cancel=should_cancel,
        on_contribution_done=on_contribution_done,
    )
    if on_report is not None:
        on_report(result.report)
    return result.tensors
