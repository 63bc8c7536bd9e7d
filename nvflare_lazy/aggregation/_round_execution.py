# SPDX-License-Identifier: Apache-2.0
"""The aggregation of one round: repeated without each contribution that fails, until an attempt succeeds.

Used by `Aggregation.run`. A contribution that cannot be read, or has forbidden values, is detected in the middle of a
pass; the unfinished output is then removed, and the round starts over without that contribution. If an object store
does not answer, the round fails instead.
"""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvflare_lazy._text import get_logger, parse_size
from nvflare_lazy.aggregation._distributed.engine import DistributedEngine
from nvflare_lazy.aggregation._distributed.shared_directory import SharedDirectory
from nvflare_lazy.aggregation._engine.passes import Engine
from nvflare_lazy.aggregation._engine.tile import ContributionError, is_store_error
from nvflare_lazy.aggregation.report import AggregationReport, Provenance, shares_of
from nvflare_lazy.aggregation.rules.base import RoundContext
from nvflare_lazy.aggregation.schema import (
    group_tensors,
    read_entries,
    reasons,
    resolve_schema,
    tensor_metas,
    validate_weights,
)
from nvflare_lazy.errors import (
    AggregationDtypeError,
    NonFiniteError,
    NothingToAggregateError,
    TooFewContributorsError,
    UnsupportedDtypeError,
    UnsupportedTensorError,
)
from nvflare_lazy.formats import StreamingWriter
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.formats.safetensors.writer import staging_path

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from nvflare_lazy.aggregation._engine.tile_pool import PassMonitor
    from nvflare_lazy.aggregation.api import Aggregation
    from nvflare_lazy.aggregation.executors import Workers
    from nvflare_lazy.aggregation.reduction import Reduction
    from nvflare_lazy.aggregation.rules import Rule
    from nvflare_lazy.aggregation.schema import RoundSchema
    from nvflare_lazy.tensors.entry import TensorEntry

logger = get_logger(__name__)


@dataclass(frozen=True)
class AggregationResult:
    """The result of a round.

    Attributes:
        tensors: The new model, opened from the file.
        report: The used contributions, and the skipped ones with their reasons.
    """

    tensors: LazyTensorDict
    report: AggregationReport


class RoundExecution:
    """A round and the contributions that have not been skipped so far; see `Aggregation.run` for its arguments."""

    def __init__(
        self,
        config: Aggregation,
        rule: Rule,
        contributions: Mapping[str, Mapping[str, Any]],
        *,
        weights: Mapping[str, float] | None,
        reference: Mapping[str, Any] | None,
        monitor: PassMonitor,
        on_contribution_done: Callable[[str], object] | None,
        workers: Workers | None = None,
    ) -> None:
        self._config = config
        self._workers = workers
        self._rule = rule
        self._monitor = monitor
        self._on_contribution_done = on_contribution_done
        self._exclude = None if config.exclude is None else re.compile(config.exclude)
        self._weights = validate_weights([*contributions], weights)
        self._reference = None if reference is None else read_entries(reference, "the global model", self._exclude)
        self._skipped: dict[str, Exception] = {}
        self._excluded: set[str] = set()
        self._entries: dict[str, dict[str, TensorEntry]] = {}
        for name in sorted(contributions):
            self._list(name, contributions[name])

    def run(self, out: str | os.PathLike[str], metadata: Mapping[str, str]) -> AggregationResult:
        """Aggregate, and open the result."""
        started = time.monotonic()
        while True:
            try:
                with ExitStack() as until_the_end:
                    tensors, schema, provenance, reduction = self._attempt(out, metadata, until_the_end)
                break
            except ContributionError as failed:
                if isinstance(failed.error, NonFiniteError) and self._config.on_non_finite == "error":
                    raise NonFiniteError(
                        f"{failed.error}; set on_non_finite='skip' to skip the contribution, or 'keep' to compute with "
                        "such values"
                    ) from None
                self._skip(failed.contributor, failed.error)
        for name in schema.names:
            self._release(name)
        shares = shares_of(schema, reduction)
        report = AggregationReport(
            provenance=provenance,
            partial={
                key: tuple(schema.names[index] for index in schema.holders[key])
                for key in schema.specs
                if len(schema.holders[key]) < len(schema.names)
            },
            excluded=tuple(sorted(self._excluded)),
            tensors=len(tensors),
            nbytes=tensors.nbytes,
            seconds=time.monotonic() - started,
            shares=shares,
        )
        return AggregationResult(tensors, report)

    def _attempt(
        self, out: str | os.PathLike[str], metadata: Mapping[str, str], until_the_end: ExitStack
    ) -> tuple[LazyTensorDict, RoundSchema, Provenance, Reduction]:
        config, rule = self._config, self._rule
        schema = self._resolve()
        groups = group_tensors(schema, self._entries, self._reference if rule.uses_reference else None)
        for group in groups:
            group.borrow(until_the_end)
        engine = Engine(
            groups,
            budget=parse_size(config.memory_budget),
            threads=config.threads,
            tile_bytes=None if config.tile_size is None else parse_size(config.tile_size),
            non_finite=config.on_non_finite,
            monitor=self._monitor,
        )
        distributed = None
        if self._workers is not None:
            shared = until_the_end.enter_context(SharedDirectory(staging_path(out, config.like)))
            distributed = DistributedEngine(
                engine, self._workers, shared, part_bytes=parse_size(config.part_size), fsync=config.fsync
            )
        context = RoundContext(
            rule,
            schema.names,
            schema.weights,
            params_type=config.params_type,
            has_reference=self._reference is not None,
            compute=(distributed or engine).compute_statistic,
        )
        reduction = rule.prepare(context)
        for group in groups:
            if rule.uses_order and group.dtype.is_complex:
                raise AggregationDtypeError(
                    f"{group.names[0]!r} is {group.dtype}, but {rule.describe()['name']!r} orders elements and complex "
                    "numbers have no order; exclude the tensor or use a mean"
                )
            reduction.check(group)
        shares = reduction.shares(tuple(range(len(schema.names))))
        provenance = Provenance(
            rule=rule.describe(),
            params_type=config.params_type,
            contributors=schema.names,
            weights=None if shares is None else dict(zip(schema.names, shares, strict=True)),
            skipped=dict(self._skipped),
            decisions=context.decisions,
        )
        metadata = dict(sorted({**metadata, **provenance.as_metadata()}.items()))
        writer = StreamingWriter(
            out,
            tensor_metas(schema.specs),
            metadata=metadata,
            max_shard_size=config.max_shard_size,
            like=config.like,
            fsync=config.fsync,
            unfinished_in=None if distributed is None else distributed.directory,
            check=self._monitor.check,
        )
        try:
            if distributed is not None:
                distributed.reduce(reduction, rule.describe()["name"], writer)
            else:
                engine.reduce(reduction, rule.describe()["name"], writer)
            tensors = writer.commit_and_open(self._monitor.upload)
            return tensors, schema, provenance, reduction
        finally:
            writer.abort()

    def _resolve(self) -> RoundSchema:
        if not self._entries:
            raise NothingToAggregateError("no contributions to aggregate" + reasons(self._skipped), self._skipped)
        schema = resolve_schema(
            self._entries,
            self._weights,
            reference=self._reference,
            params_type=self._config.params_type,
            requires_all_tensors=self._rule.requires_all_tensors,
            on_mismatch=self._config.on_mismatch,
        )
        for name, error in schema.skipped.items():
            self._skip(name, error)
        count, needed = len(schema.names), max(self._rule.min_contributors, self._config.min_contributors)
        if count < needed:
            raise TooFewContributorsError(
                f"{self._rule!r} requires at least {needed} contributors, got {count}" + reasons(self._skipped)
            )
        return schema

    def _list(self, name: str, tensors: Mapping[str, Any]) -> None:
        """List the tensors of a contribution, or skip it."""
        try:
            if self._exclude is not None:
                self._excluded.update(key for key in tensors if self._exclude.search(key))
            self._entries[name] = read_entries(tensors, repr(name), self._exclude)
        except (UnsupportedTensorError, UnsupportedDtypeError) as error:
            if self._config.on_mismatch == "error":
                raise
            self._skip(name, error)
        except Exception as error:
            if is_store_error(error):
                raise
            self._skip(name, error)

    def _skip(self, name: str, error: Exception) -> None:
        logger.warning("Aggregation skipped the contribution of %s: %s: %s", name, type(error).__name__, error)
        self._skipped[name] = error
        self._entries.pop(name, None)
        self._release(name)

    def _release(self, name: str) -> None:
        if self._on_contribution_done is not None:
            self._on_contribution_done(name)
