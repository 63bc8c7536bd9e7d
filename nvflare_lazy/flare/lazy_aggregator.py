# SPDX-License-Identifier: Apache-2.0
"""`LazyAggregator`: aggregates the results of a round within a memory budget, by any rule, to a file.

It reads results from scratch, as lazy tensors, and the persistor links the file it writes as a checkpoint. It keeps
results until the round ends, since the result must not depend on their order of arrival. In the middle of a tree of
clients, it passes the aggregate upward, together with the sum of the weights.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from nvflare.apis.dxo import DXO, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.aggregators.weighted_aggregation_helper import AggregationStatsKey
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.workflows.base_fedavg import make_fedavg_metrics_aggregation_info

from nvflare_lazy._text import get_logger, logs_printably, quoted
from nvflare_lazy.aggregation import Aggregation, AggregationReport, Progress
from nvflare_lazy.aggregation import ParamsType as ParamsKind
from nvflare_lazy.aggregation.executors import Workers
from nvflare_lazy.aggregation.rules import Mean, to_rule
from nvflare_lazy.aggregation.schema import listed
from nvflare_lazy.errors import NothingToAggregateError, ResultMismatchError, TooFewResultsError
from nvflare_lazy.flare import job_context
from nvflare_lazy.flare.accepted_result import (
    Contribution,
    Expectation,
    RoundResults,
    accept_result,
    check_params_type,
    client_of,
    described,
    majority_kind,
    odd_kind,
    shown,
)
from nvflare_lazy.flare.apply_update import ModelUpdate
from nvflare_lazy.flare.model_output import ModelOutput
from nvflare_lazy.flare.subtree import SUBTREE_KEY, Subtree
from nvflare_lazy.flare.tensor_offload import DEFAULT_MEMORY_BUDGET
from nvflare_lazy.flare.weights import as_weights, is_weight
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.transport.registration import register

logger = get_logger(__name__)

OnTooFew = Literal["fail", "skip"]


@logs_printably
class LazyAggregator(ModelAggregator):
    """Aggregates with `nvflare_lazy.aggregate`'s engine, for FedAvg and ScatterAndGather.

    | to                                         | set                                                            |
    |--------------------------------------------|----------------------------------------------------------------|
    | tolerate malicious clients                 | `rule="trimmed_mean"`, `"median"`, `"krum"`, …, `rule_args`    |
    | weight clients                             | `aggregation_weights={"site-1": 2.0}`                          |
    | exclude tensors                            | `exclude_vars="running_(mean|var)"`                            |
    | use a server optimizer                     | `server_optimizer={"name": "fedadam", "lr": 0.01}`             |
    | continue when a round has too few results  | `min_results`, `on_too_few="skip"`                             |
    | aggregate on several processes or machines | `executor="processes"`, or `{"name": "ray", ...}`              |

    Results are used all-or-nothing: a result that was not received, does not match the global model, or cannot be read
    is skipped, and the reason is logged. Metrics are averaged as in NVFlare's FedAvg. Differences are added to the
    global model tile by tile, so controllers get the whole model. In the middle of a hierarchy of clients, the mean
    of a subtree is passed upward instead, with the sum of its weights; see `docs/how-to/hierarchies.md`.

    Args:
        rule: Name of the rule.
        rule_args: Arguments of the rule.
        exclude_vars: Regular expression; tensors with matching names are excluded.
        aggregation_weights: Factors for the weights of some clients, multiplied by their numbers of training steps.
        memory_budget: Memory for aggregation. Default: that of `TensorOffload`.
        on_non_finite: What to do with results that contain NaN or infinity: "skip", "keep" or "error".
        min_results: The number of usable results that a round requires. The aggregate of a subtree counts as the
            results that it consists of.
        on_too_few: "fail", or "skip" the round, which leaves the global model unchanged. In the middle of a tree, too
            few results are always skipped.
        server_optimizer: An optimizer that updates the global model; see `ModelUpdate`.
        params_type: The kind of results: "FULL" for models, "DIFF" for differences. Default: the kind of most results
            of a round.
        executor: Workers that compute parts of the aggregate, for example `{"name": "ray", "address": "auto"}`; see
            `nvflare_lazy.aggregation.executors.Workers`. They are started in the first round and stopped when the job
            ends. Scratch and checkpoints must be on storage that they share. A server optimizer, and the addition of
            differences to the global model, run on the server.

    Example:
        >>> {"path": "nvflare_lazy.flare.LazyAggregator", "args": {"rule": "krum", "rule_args": {"num_byzantine": 1}}}
    """

    def __init__(
        self,
        rule: str = "mean",
        rule_args: dict[str, Any] | None = None,
        exclude_vars: str | None = None,
        aggregation_weights: dict[str, float] | None = None,
        memory_budget: int | str | None = None,
        on_non_finite: Literal["skip", "keep", "error"] = "skip",
        min_results: int = 1,
        on_too_few: OnTooFew = "fail",
        server_optimizer: dict[str, Any] | None = None,
        params_type: ParamsKind | None = None,
        executor: str | dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_params_type(params_type)
        if on_too_few not in ("fail", "skip"):
            raise ValueError(f"on_too_few must be 'fail' or 'skip', got {on_too_few!r}")
        self.rule = rule
        self.rule_args = rule_args
        self.exclude_vars = exclude_vars
        self.aggregation_weights = aggregation_weights
        self.memory_budget = memory_budget
        self.on_non_finite = on_non_finite
        self.min_results = min_results
        self.on_too_few = on_too_few
        self.server_optimizer = server_optimizer
        self.params_type = params_type
        self.executor = executor
        self._workers = None if executor is None else Workers(executor)
        # Raises on invalid arguments now rather than at the end of the first round.
        self._aggregation("FULL")
        self._exclude = re.compile(exclude_vars) if exclude_vars else None
        self._update = ModelUpdate(server_optimizer)
        self._round = RoundResults(aggregation_weights or {})
        self._previous_kind: ParamsKind | None = None
        # In the middle of a tree: whether it is, and the task of the round, which has the global model.
        self._passes_upward = False
        self._task: Shareable | None = None
        self._warned_of_tree = False
        self._logged_once = False
        self._checked_settings = False
        register()

    # ---- NVFlare's side ------------------------------------------------------------------------------------------

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN:
            self._passes_upward = job_context.is_middle_of_tree(fl_ctx)
            if self._passes_upward and self.server_optimizer is not None:
                self.system_panic(
                    "server_optimizer updates the global model, which only the server does; remove it from the "
                    "LazyAggregator of this client",
                    fl_ctx,
                )
        elif event_type == EventType.BEFORE_TASK_EXECUTION and self._passes_upward:
            self._round.clear()
            self._task = fl_ctx.get_prop(FLContextKey.TASK_DATA)
        elif event_type == EventType.AFTER_TASK_EXECUTION:
            self._task = None
        elif event_type == EventType.END_RUN:
            self._task = None
            self._round.clear()
            if self._workers is not None:
                self._workers.close()
            job_context.release_scratch(fl_ctx)

    def accept(self, shareable: Shareable, fl_ctx: FLContext) -> bool:
        """Take a client's result into the round, for ScatterAndGather.

        Returns:
            Whether it is taken. An error, which is what FedAvg wants to have, would end the task for all clients.
        """
        self.fl_ctx = fl_ctx
        client = job_context.sender_of(fl_ctx) or str(AppConstants.CLIENT_UNKNOWN)
        try:
            late = _late_round(shareable, self._round_number())
            if late is not None:
                # The result of this round may still arrive: the client is not skipped.
                self.warning(f"Round {self._round_number()}: ignored a late result of {shown(client)} for round {late}")
                return False
            dxo = from_shareable(shareable)
        except Exception as error:
            self._skip(client, f"the result of {shown(client)} is invalid: {quoted(str(error))}")
            return False
        try:
            self._take(client, dxo)
        except ResultMismatchError:
            return False
        return True

    def aggregate(self, fl_ctx: FLContext) -> Shareable | None:
        """Combine the results, for ScatterAndGather, or those of a subtree, for NVFlare's `AggrUpdater`.

        Returns:
            The aggregate. None if a subtree has too few results, so that nothing is passed upward.
        """
        try:
            aggregated: Shareable = super().aggregate(fl_ctx)
        except TooFewResultsError as error:
            if not self._passes_upward:
                raise
            self.warning(f"{error}; nothing is passed upward")
            return None
        return aggregated

    def accept_model(self, model: FLModel) -> None:
        """Take a client's result into the round.

        Raises:
            ResultMismatchError: If it cannot be used; the round continues without it.
        """
        self._take(client_of(model), model)

    def expected(self) -> Expectation:
        """Return the properties that results of the round must have."""
        return Expectation(
            self._global_weights(),
            self._exclude,
            self.params_type,
            names=job_context.tensor_names(self.fl_ctx),
            in_tree=job_context.is_in_tree(self.fl_ctx),
        )

    def _global_weights(self) -> Mapping[str, Any] | None:
        """Return the global model of the round, which is in the task in the middle of a tree, or None."""
        if not self._passes_upward or self._task is None:
            return job_context.global_weights(self.fl_ctx)
        weights = from_shareable(self._task).data
        return weights if isinstance(weights, dict) and any(map(is_weight, weights.values())) else None

    def _take(self, client: str, stated: FLModel | DXO) -> None:
        # A node in the middle of a tree may pass the results of its clients upward in several parts.
        is_part = self._is_mean and isinstance(stated.meta, dict) and SUBTREE_KEY in stated.meta
        if client in self._round.results and not is_part:
            error = f"{shown(client)} sent a second result for this round; the first one is used"
            self.warning(f"Round {self._round_number()}: skipped the result of {shown(client)}: {error}")
            raise ResultMismatchError(error)
        try:
            result = accept_result(client, stated, self.expected())
        except ResultMismatchError as error:
            self._skip(client, str(error))
            raise
        if result.dropped_metrics:
            self.warning(
                f"Round {self._round_number()}: ignored metrics of {shown(client)} that are not finite numbers: "
                f"{result.dropped_metrics}"
            )
        self._round.add(result, stated.data if isinstance(stated, DXO) else stated.params)

    def aggregate_model(self) -> FLModel:
        """Combine the results of the round and release them."""
        started = time.monotonic()
        try:
            aggregated, weights = self._combine()
        except TooFewResultsError as error:
            if self.on_too_few == "fail" or self._passes_upward:
                raise
            self.warning(f"{error}; the global model is unchanged")
            aggregated, weights = [], self._unchanged()
        finally:
            self._round.clear()
        log = job_context.round_log_of(self.fl_ctx)
        if log is not None:
            log.on_aggregated(time.monotonic() - started, aggregated, weights.metrics)
        return weights

    def reset_stats(self) -> None:
        """Release the remaining results of a round."""
        self._round.clear()

    # ---- how -----------------------------------------------------------------------------------------------------

    def _combine(self) -> tuple[list[str], FLModel]:
        """Return the clients whose results are used, and the aggregate."""
        results = self._round
        self._warn_of_settings()
        self._warn_of_tree()
        kind = self._kind_of_round()
        self._warn_if_in_memory()
        base = self._global_weights()
        numpy = results.numpy(base)
        report, tensors = self._mean(kind, base)
        aggregated = self._used(report)
        count = sum(results.results[name].count for name in aggregated)
        if count < self.min_results:
            raise self._too_few(f"{count} usable results, and min_results is {self.min_results}")
        self._previous_kind = kind
        self._publish_stats(aggregated, report)
        clients = sorted({results.results[name].client for name in aggregated})
        metrics = results.mean_metrics(aggregated)
        if self._passes_upward:
            params = self._named(tensors, base, numpy=numpy)
            meta = self._upward_meta(aggregated, report)
            return clients, FLModel(params=params, params_type=ParamsType(kind), metrics=metrics, meta=meta)
        if kind == "DIFF" or self.server_optimizer is not None:
            tensors = self._update.apply(
                base or {},
                tensors,
                kind,
                self.fl_ctx,
                self._round_number(),
                memory_budget=self.budget,
                progress=self._on_progress(),
            )
        return clients, FLModel(
            params=self._named(tensors, base, numpy=numpy),
            params_type=ParamsType.FULL,
            metrics=metrics,
            meta={AppConstants.METRICS_AGGREGATION_INFO: self._metrics_info(aggregated)},
        )

    def _kind_of_round(self) -> ParamsKind:
        """Return the kind of the round, and skip the results of the other kind."""
        results = self._round.results
        kind = self.params_type or majority_kind((result.kind for result in results.values()), self._previous_kind)
        for name, result in list(results.items()):
            if result.kind != kind:
                self._drop(name, odd_kind(name, result.kind, f"most clients sent {kind}"))
        return kind

    def _upward_meta(self, aggregated: list[str], report: AggregationReport) -> dict[str, Any]:
        """Return the metadata with which the aggregate of a subtree counts as the results that it consists of."""
        results, weights, contributions = self._round.results, self._round.weights, self._round.contributions()
        total = math.fsum(weights[name] for name in aggregated)
        own = {
            name: math.fsum(contributions[holder].weight for holder in holders)
            for name, holders in report.partial.items()
        }
        subtree = Subtree(
            sum(results[name].count for name in aggregated),
            {name: weight for name, weight in own.items() if weight != total},
        )
        return {MetaKey.NUM_STEPS_CURRENT_ROUND: total, **subtree.as_meta()}

    def _used(self, report: AggregationReport) -> list[str]:
        """Return the names of the results that an aggregate consists of."""
        parts = self._round.contributions()
        return list(dict.fromkeys(parts[name].result for name in report.contributors if name in parts))

    def _mean(self, kind: ParamsKind, base: Mapping[str, Any] | None) -> tuple[AggregationReport, LazyTensorDict]:
        """Aggregate the results by the rule, and skip invalid ones."""
        output = ModelOutput.of(self.fl_ctx, max(self._round.tensors.values(), key=len, default={}))
        while True:
            parts = self._round.contributions()
            try:
                result = self._aggregation(kind, output.max_shard_size).run(
                    {name: part.tensors for name, part in parts.items()},
                    output.path,
                    weights={name: part.weight for name, part in parts.items()},
                    reference=base,
                    metadata=job_context.provenance(self.fl_ctx, self._round_number()),
                    progress=self._on_progress(),
                    should_cancel=self._cancelled,
                )
            except NothingToAggregateError as error:
                self._drop_skipped(error.skipped, parts)
                raise self._too_few("no usable results", error) from error
            self._drop_skipped(result.report.skipped, parts)
            if all(parts[name].result in self._round.results for name in result.report.contributors):
                return result.report, output.finish(result.tensors)
            # Only some tensors of a subtree's aggregate could be used. It is used all-or-nothing, so the others go.
            del result

    def _drop_skipped(self, skipped: Mapping[str, Exception], parts: Mapping[str, Contribution]) -> None:
        for name, reason in skipped.items():
            if parts[name].result in self._round.results:
                self._drop(parts[name].result, str(reason))

    def _too_few(self, found: str, error: NothingToAggregateError | None = None) -> TooFewResultsError:
        """Return the error of a round with too few results, which lists the clients of the job if they are known."""
        offload = job_context.offload_of(self.fl_ctx)
        outcomes = "" if offload is None else offload.outcomes()
        if error is not None and not (outcomes and error.skipped):
            found = f"{found}: {error}"
        return TooFewResultsError(
            f"round {self._round_number()} has {found}" + (f"; clients: {outcomes}" if outcomes else "")
        )

    def _drop(self, client: str, reason: str) -> None:
        """Skip a result that was accepted."""
        del self._round.results[client]
        self._skip(client, reason)

    def _aggregation(self, kind: ParamsKind, max_shard_size: int | None = None) -> Aggregation:
        return Aggregation(
            rule={"name": self.rule, **(self.rule_args or {})},
            params_type=kind,
            memory_budget=self.budget,
            exclude=self.exclude_vars,
            on_mismatch="skip",
            on_non_finite=self.on_non_finite,
            max_shard_size=max_shard_size,
            # The persistor flushes the file when it becomes the checkpoint.
            fsync=False,
            executor=self._workers,
        )

    @property
    def budget(self) -> int | str:
        """The memory to work in."""
        if self.memory_budget is not None:
            return self.memory_budget
        offload = job_context.offload_of(self.fl_ctx)
        return DEFAULT_MEMORY_BUDGET if offload is None else offload.memory_budget

    def _named(self, tensors: LazyTensorDict, base: Mapping[str, Any] | None, *, numpy: bool) -> dict[str, Any]:
        """Return the next global model, its tensors in the order the model had them in before."""
        weights = as_weights(tensors.entries, numpy=numpy)
        order = {name: place for place, name in enumerate(base or ())}
        return dict(sorted(weights.items(), key=lambda item: order.get(item[0], len(order))))

    def _unchanged(self) -> FLModel:
        return FLModel(params=dict(job_context.global_weights(self.fl_ctx) or {}), params_type=ParamsType.FULL)

    def _skip(self, client: str, reason: str) -> None:
        log = job_context.round_log_of(self.fl_ctx)
        # `TensorOffload` logs what it rejects, before the empty result arrives here.
        if log is None or log.on_skip(client, reason):
            self.warning(f"Round {self._round_number()}: skipped the result of {shown(client)}: {reason}")

    def _warn_if_in_memory(self) -> None:
        """Log once that results take memory because the job has no `TensorOffload`."""
        if self._logged_once or job_context.offload_of(self.fl_ctx) is not None:
            return
        results = self._round.results.values()
        if results and not any(result.on_disk for result in results):
            self._logged_once = True
            self.warning(
                "Results are kept in memory: no TensorOffload is configured. "
                "Add nvflare_lazy.flare.TensorOffload to the server's components."
            )

    def _warn_of_settings(self) -> None:
        """Log once each argument that has no effect in this job."""
        if self._checked_settings or not self._round.results:
            return
        self._checked_settings = True
        found = []
        if self.aggregation_weights and not to_rule({"name": self.rule, **(self.rule_args or {})}).uses_weights:
            found.append(f"aggregation_weights, because the rule {self.rule} ignores weights")
        clients = self._clients()
        unknown = sorted({*(self.aggregation_weights or {})} - clients)
        if clients and unknown:
            found.append(f"aggregation_weights of {listed(unknown)}, because the job has no such client")
        if self._exclude and not any(result.excluded for result in self._round.results.values()):
            found.append(f"exclude_vars={quoted(self.exclude_vars)}, because no tensor has a matching name")
        for setting in found:
            self.warning(f"Setting without effect: {setting}; remove or correct it")

    @property
    def _is_mean(self) -> bool:
        return isinstance(to_rule({"name": self.rule, **(self.rule_args or {})}), Mean)

    def _warn_of_tree(self) -> None:
        """Log once if the aggregate of a tree is not that of its clients."""
        if self._warned_of_tree or self.fl_ctx is None:
            return
        results = self._round.results.values()
        if not self._is_mean and (
            self._passes_upward
            or job_context.is_top_of_tree(self.fl_ctx)
            or any(result.subtree is not None for result in results)
        ):
            self._warned_of_tree = True
            self.warning(
                f"Rule {self.rule} sees the aggregates of subtrees, not the results of their clients: a tree gives the "
                "same model as its clients alone only with rule 'mean'; see docs/how-to/hierarchies.md"
            )

    def _clients(self) -> set[str]:
        engine = self.fl_ctx.get_engine() if self.fl_ctx else None
        return {client.name for client in getattr(engine, "get_clients", list)()}

    def _on_progress(self) -> Callable[[Progress], object] | None:
        log = job_context.round_log_of(self.fl_ctx)
        return None if log is None else log.on_aggregation_progress

    def _cancelled(self) -> bool:
        signal = self.fl_ctx.get_run_abort_signal() if self.fl_ctx else None
        return bool(signal is not None and signal.triggered)

    def _round_number(self) -> int | None:
        number: int | None = self.fl_ctx.get_prop(AppConstants.CURRENT_ROUND) if self.fl_ctx else None
        return number

    def _metrics_info(self, aggregated: list[str]) -> dict[str, Any]:
        weights = self._round.weights
        key = "effective_fedavg_metric_weight"
        info: dict[str, Any] = make_fedavg_metrics_aggregation_info(
            weight_key=key,
            weight_formula="aggregation_weight * NUM_STEPS_CURRENT_ROUND",
            site_weights=[{"name": name, "weight": weights[name], "weight_key": key} for name in aggregated],
        )
        return info

    def _publish_stats(self, aggregated: list[str], report: AggregationReport) -> None:
        """Leave the statistics where NVFlare's own aggregation leaves them."""
        if self.fl_ctx is None:
            return
        results = [self._round.results[client] for client in aggregated]
        skipped = {name for result in results for name in result.excluded}
        seen = {name for result in results for name in result.tensors} | skipped
        # A subtree's tensors of different weights are separate contributions.
        partial = sum(any(name not in result.tensors for result in results) for name in report.partial)
        stats = {
            AggregationStatsKey.ROUND: self._round_number(),
            AggregationStatsKey.ACCEPTED_CONTRIBUTIONS: len(aggregated),
            AggregationStatsKey.CONTRIBUTORS: sorted({result.client for result in results}),
            AggregationStatsKey.KEYS_AGGREGATED: report.tensors,
            AggregationStatsKey.KEYS_SEEN: len(seen),
            AggregationStatsKey.FULLY_MATCHED_KEYS: report.tensors - partial,
            AggregationStatsKey.PARTIALLY_MATCHED_KEYS: partial,
            AggregationStatsKey.SKIPPED_KEYS: len(skipped),
        }
        self.fl_ctx.set_prop(AppConstants.AGGREGATION_STATS, stats, private=True, sticky=False)

    def warning(self, message: str) -> None:
        """Log a warning, even outside a run."""
        if self.fl_ctx is None:
            logger.warning("%s", message)
        else:
            self.log_warning(self.fl_ctx, message, fire_event=False)


def _late_round(shareable: Shareable, current: int | None) -> str | None:
    """Return the round that a result is for, as text, if it is not the current one."""
    jar = shareable.get_cookie_jar() or {}
    stated = jar.get(AppConstants.CONTRIBUTION_ROUND)
    return None if stated is None or (type(stated) is int and stated == current) else described(stated)
