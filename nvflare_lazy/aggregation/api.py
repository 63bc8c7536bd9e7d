# SPDX-License-Identifier: Apache-2.0
"""`aggregate()` and `Aggregation`: one model on disk from many contributions, by a rule, within a memory budget.

If a contribution fails while it is read, the round is repeated without it, which is simple, and correct for every rule.
The output file is published only when it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from nvflare_lazy._text import parse_size
from nvflare_lazy.aggregation._engine.tile import NonFinitePolicy
from nvflare_lazy.aggregation._engine.tile_pool import PassMonitor, Progress
from nvflare_lazy.aggregation._round_execution import AggregationResult, RoundExecution
from nvflare_lazy.aggregation.executors import ExecutorSpec, Workers, workers_of
from nvflare_lazy.aggregation.rules import Rule, to_rule
from nvflare_lazy.aggregation.schema import MismatchPolicy

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from nvflare_lazy.aggregation.report import AggregationReport
    from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict

#: The kind of contributions: whole models, or differences from the global model.
ParamsType = Literal["FULL", "DIFF"]


@dataclass(frozen=True)
class Aggregation:
    """The configuration of aggregation: created once, for example from a configuration file, and run for each round.

    | to | set |
    |---|---|
    | tolerate malicious contributors | `rule="trimmed_mean"`, or `rule={"name": "krum", "num_byzantine": 2}` |
    | limit memory | `memory_budget="64MiB"` |
    | exclude tensors | `exclude="running_(mean|var)$"` |
    | skip contributions that do not match | `on_mismatch="skip"`, `on_non_finite="skip"` |
    | write several files | `max_shard_size="5GB"` |
    | write a directory for `from_pretrained` | `like=HF_DIRECTORY` |

    Args:
        rule: The rule: a name, a name with parameters, or an object.
        params_type: "FULL" if contributors send whole models, "DIFF" if they send differences from the global model.
        memory_budget: Bytes of memory for tiles, for example "256MiB".
        threads: Number of threads. Default: one per core.
        tile_size: Maximum bytes of a tile in the dtype of its tensors, for example "1MiB". Default: the fastest size.
        exclude: Regular expression; tensors whose names match it are excluded from the result.
        on_mismatch: If the names, shapes or dtypes of a contribution differ from most contributions, or from the
            global model: raise ("error"), or "skip" the contribution.
        on_non_finite: If a floating-point tensor of a contribution contains NaN or infinity: compute with it ("keep"),
            "skip" the contribution, or raise ("error").
        min_contributors: Minimum number of usable contributions; with fewer, raise.
        max_shard_size: Maximum bytes of a file; a larger result is split into several files.
        like: A Hugging Face directory, whose configuration and tokenizer are copied next to the result.
        fsync: Whether the result must survive a power failure. Without it, writing is faster; set False if a later step
            flushes the file.
        executor: Workers that compute parts of the result: an executor of `concurrent.futures`, for example a Dask
            client's, or "processes", "dask" or "ray", alone or with arguments; see `Workers`. Inputs and outputs must
            be on storage that the workers share. Default: threads of this process. With an executor, `memory_budget`
            and `threads` apply to each part, and the default is one thread.
        part_size: Bytes that a part reads, about. The result does not depend on it.

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
    like: str | os.PathLike[str] | None = None
    fsync: bool = True
    executor: ExecutorSpec | Workers | None = None
    part_size: int | str = "1GiB"

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
        for name in ("memory_budget", "tile_size", "max_shard_size", "part_size"):
            if getattr(self, name) is not None:
                parse_size(getattr(self, name))
        if self.executor is not None and not isinstance(self.executor, Workers):
            Workers(self.executor)
        if self.exclude is not None:
            try:
                re.compile(self.exclude)
            except re.error as error:
                raise ValueError(f"exclude is not a valid regular expression: {self.exclude!r}: {error}") from None

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
            out: The file to write, or a directory for `model.safetensors`. A directory that does not exist, such
                as "newdir/", is created.
            weights: Weights by contributor; only their ratios count. Default: equal weights.
            reference: The global model. If it is passed, contributions must have its names and shapes.
            metadata: Text to store in the result, in addition to its provenance.
            progress: Called from time to time in the calling thread.
            should_cancel: Called repeatedly; if it returns true, the aggregation stops and its output is removed. For
                example, the `is_set` of an event.
            on_contribution_done: Called once with the name of each contributor, as soon as its contribution is no
                longer read.

        Raises:
            AggregationError: If no result can be computed; `errors.py` lists the subclasses.
            RemoteError: If the store of an input at a URL does not answer, or denies access.
        """
        with ExitStack() as until_done:
            workers = None if self.executor is None else until_done.enter_context(workers_of(self.executor))
            return RoundExecution(
                self,
                to_rule(self.rule),
                contributions,
                weights=weights,
                reference=reference,
                monitor=PassMonitor(progress, should_cancel),
                on_contribution_done=on_contribution_done,
                workers=workers,
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
    like: str | os.PathLike[str] | None = None,
    fsync: bool = True,
    executor: ExecutorSpec | Workers | None = None,
    part_size: int | str = "1GiB",
    reference: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[Progress], object] | None = None,
    should_cancel: Callable[[], bool] | None = None,
    on_contribution_done: Callable[[str], object] | None = None,
    on_report: Callable[[AggregationReport], object] | None = None,
) -> LazyTensorDict:
    """Aggregate many models into one, tile by tile, within a memory budget.

    Contributions are processed in the order of their names; values are summed in float64 and rounded once. The same
    contributions give the same bits. A contribution that cannot be read is skipped. If the store of an input at a URL
    does not answer, or denies access, `RemoteError` is raised.

    Args:
        contributions: For each contributor, tensors or arrays by name, lazy or not.
        out: The safetensors file to write, or a directory for `model.safetensors`.
        rule: The rule: a name, a name with parameters, or an object.
        weights: Weights by contributor. Default: equal weights.
        memory_budget: Bytes of memory for tiles.
        params_type: See `Aggregation`, which describes all arguments down to `part_size`.
        threads: Number of threads.
        tile_size: Maximum bytes of a tile.
        exclude: Regular expression; tensors whose names match it are excluded.
        on_mismatch: "error" or "skip".
        on_non_finite: "keep", "skip" or "error".
        min_contributors: Minimum number of usable contributions.
        max_shard_size: Maximum bytes of a file.
        like: A Hugging Face directory whose other files are copied next to the result.
        fsync: Whether the result must survive a power failure.
        executor: Workers that compute parts of the result.
        part_size: Bytes that a part reads, about.
        reference: The global model; see `Aggregation.run`, which describes all arguments down to
            `on_contribution_done`.
        metadata: Text to store in the result.
        progress: Called from time to time.
        should_cancel: Called repeatedly; if it returns true, the aggregation stops.
        on_contribution_done: Called with each contributor's name when its contribution is no longer read.
        on_report: Called with the report: the contributions that were used with their weights, and those skipped.

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
        like,
        fsync,
        executor,
        part_size,
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
