# SPDX-License-Identifier: Apache-2.0
"""One round being aggregated: attempts with fewer and fewer contributors, until one of them succeeds.

Behind `Aggregation.run`. Whoever cannot be read, or sends what it must not, is found out in the middle of a pass; then
the half-written result goes away and the pass begins again without that contribution.
"""

from __future__ import annotations

import logging
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvflare_lazy._text import parse_size
from nvflare_lazy.aggregation._engine.passes import Engine
from nvflare_lazy.aggregation._engine.tile import ContributionError
from nvflare_lazy.aggregation.report import AggregationReport, Provenance, shares_of
from nvflare_lazy.aggregation.schema import agree, checked_weights, groups_of, meta_of, read_entries, reasons
from nvflare_lazy.errors import (
    NonFiniteError,
    NothingToAggregateError,
    TooFewContributorsError,
    UnsupportedDtypeError,
    UnsupportedTensorError,
)
from nvflare_lazy.formats import StreamingWriter
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from nvflare_lazy.aggregation._engine.threads import Watch
    from nvflare_lazy.aggregation.api import Aggregation
    from nvflare_lazy.aggregation.reduction import Reduction
    from nvflare_lazy.aggregation.rules import Rule
    from nvflare_lazy.aggregation.schema import Agreement
    from nvflare_lazy.aggregation.statistics import Statistic
    from nvflare_lazy.tensors.entry import TensorEntry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AggregationResult:
    """What comes out of a round.

    Attributes:
        tensors: The new model, opened from the file.
        report: Who took part, who did not and why.
    """

    tensors: LazyTensorDict
    report: AggregationReport


class _RoundOfRule:
    """What the rule gets to see."""

    def __init__(self, agreement: Agreement, rule: Rule, params_type: str, has_reference: bool, engine: Engine) -> None:
        self.names = agreement.names
        self.weights = agreement.weights
        self.params_type = params_type
        self.has_reference = has_reference
        self.decisions: dict[str, Any] = {}
        self._rule = rule
        self._engine = engine

    def gather(self, statistic: Statistic) -> Any:
        if not self._rule.whole_updates:
            raise TypeError(f"{type(self._rule).__name__} gathers statistics, so it must say whole_updates = True")
        return self._engine.gather(statistic)

    def note(self, **decisions: Any) -> None:
        self.decisions.update(decisions)


class RunningRound:
    """A round with those who still take part in it.

    Args:
        config: How rounds are aggregated.
        rule: Its rule.
        contributions: For each contributor, tensors or arrays by name.
        weights: Weights by contributor.
        reference: The global model.
        watch: Told about progress, and asked whether to go on.
        release: Called with the name of each contributor once it is not read any more.
    """

    def __init__(
        self,
        config: Aggregation,
        rule: Rule,
        contributions: Mapping[str, Mapping[str, Any]],
        *,
        weights: Mapping[str, float] | None,
        reference: Mapping[str, Any] | None,
        watch: Watch,
        release: Callable[[str], object] | None,
    ) -> None:
        self._config = config
        self._rule = rule
        self._watch = watch
        self._release = release
        self._exclude = None if config.exclude is None else re.compile(config.exclude)
        self._weights = checked_weights([*contributions], weights)
        self._reference = None if reference is None else read_entries(reference, "the global model", self._exclude)
        self._left_out: dict[str, Exception] = {}
        self._excluded: set[str] = set()
        self._entries: dict[str, dict[str, TensorEntry]] = {}
        for name in sorted(contributions):
            self._list(name, contributions[name])

    def run(self, out: str | os.PathLike[str], metadata: Mapping[str, str]) -> AggregationResult:
        """Aggregate, and open the result.

        Args:
            out: The file to write.
            metadata: Text to store in it.
        """
        started = time.monotonic()
        while True:
            try:
                with ExitStack() as until_the_end:
                    tensors, agreement, provenance, reduction = self._attempt(out, metadata, until_the_end)
                break
            except ContributionError as failed:
                if isinstance(failed.error, NonFiniteError) and self._config.on_non_finite == "error":
                    raise failed.error from None
                self._leave_out(failed.contributor, failed.error)
        for name in agreement.names:
            self._let_go(name)
        shares = shares_of(agreement, reduction)
        report = AggregationReport(
            provenance=provenance,
            partial={
                key: tuple(agreement.names[index] for index in agreement.holders[key])
                for key in agreement.specs
                if len(agreement.holders[key]) < len(agreement.names)
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
    ) -> tuple[LazyTensorDict, Agreement, Provenance, Reduction]:
        config, rule = self._config, self._rule
        agreement = self._agree()
        has_reference = self._reference is not None
        groups = groups_of(agreement, self._entries, self._reference if rule.uses_reference else None)
        for group in groups:
            group.borrow(until_the_end)
        engine = Engine(
            groups,
            budget=parse_size(config.memory_budget),
            threads=config.threads,
            tile_bytes=None if config.tile_size is None else parse_size(config.tile_size),
            non_finite=config.on_non_finite,
            watch=self._watch,
        )
        seen = _RoundOfRule(agreement, rule, config.params_type, has_reference, engine)
        reduction = rule.prepare(seen)
        for group in groups:
            reduction.check(group)
        shares = reduction.shares(tuple(range(len(agreement.names))))
        provenance = Provenance(
            rule=rule.describe(),
            params_type=config.params_type,
            contributors=agreement.names,
            weights=None if shares is None else dict(zip(agreement.names, shares, strict=True)),
            left_out=dict(self._left_out),
            decisions=seen.decisions,
        )
        metadata = dict(sorted({**metadata, **provenance.as_metadata()}.items()))
        writer = StreamingWriter(
            out,
            meta_of(agreement.specs),
            metadata=metadata,
            max_shard_size=config.max_shard_size,
            durable=config.durable,
        )
        try:
            engine.reduce(reduction, rule.describe()["name"], writer)
            tensors = LazyTensorDict.from_files(writer.commit(), metadata=metadata)
            return tensors, agreement, provenance, reduction
        finally:
            writer.abort()

    def _agree(self) -> Agreement:
        if not self._entries:
            raise NothingToAggregateError("there is no contribution" + reasons(self._left_out))
        agreement = agree(
            self._entries,
            self._weights,
            reference=self._reference,
            whole_updates=self._rule.whole_updates,
            on_mismatch=self._config.on_mismatch,
        )
        for name, error in agreement.left_out.items():
            self._leave_out(name, error)
        count, needed = len(agreement.names), max(self._rule.needs, self._config.min_contributors)
        if count < needed:
            raise TooFewContributorsError(
                f"{self._rule!r} with {count} contributors: at least {needed} are needed" + reasons(self._left_out)
            )
        return agreement

    def _list(self, name: str, tensors: Mapping[str, Any]) -> None:
        """Find out what a contributor sent."""
        try:
            if self._exclude is not None:
                self._excluded.update(key for key in tensors if self._exclude.search(key))
            self._entries[name] = read_entries(tensors, repr(name), self._exclude)
        except (UnsupportedTensorError, UnsupportedDtypeError) as error:
            if self._config.on_mismatch == "error":
                raise
            self._leave_out(name, error)
        except Exception as error:
            self._leave_out(name, error)

    def _leave_out(self, name: str, error: Exception) -> None:
        logger.warning("%s does not take part in the aggregation: %s: %s", name, type(error).__name__, error)
        self._left_out[name] = error
        self._entries.pop(name, None)
        self._let_go(name)

    def _let_go(self, name: str) -> None:
        if self._release is not None:
            self._release(name)
