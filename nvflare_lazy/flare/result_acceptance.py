# SPDX-License-Identifier: Apache-2.0
"""`ResultAcceptance`: accepts or rejects each result of a client, before NVFlare's or other components read it.

`TensorOffload` calls it. An accepted result has plain values only; a rejected one has no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.app_common.app_constant import AlgorithmConstants, AppConstants

from nvflare_lazy._text import quoted
from nvflare_lazy.aggregation import ParamsType
from nvflare_lazy.aggregation.schema import CONVERTIBLE
from nvflare_lazy.errors import ResultMismatchError
from nvflare_lazy.flare import job_context
from nvflare_lazy.flare.accepted_result import (
    AcceptedResult,
    Expectation,
    accept_number,
    accept_result,
    described,
    majority_kind,
    shown,
    spec_of,
)
from nvflare_lazy.flare.job_context import RunningAggregation
from nvflare_lazy.flare.results_in_memory import is_encrypted
from nvflare_lazy.flare.round_log import RoundLog
from nvflare_lazy.flare.tensor_names import renamed
from nvflare_lazy.flare.weights import is_array, zero_controls
from nvflare_lazy.tensors.converted_sources import CastSource
from nvflare_lazy.tensors.dtypes import by_torch
from nvflare_lazy.tensors.entry import TensorEntry


class ResultAcceptance:
    """Accepts the results of a job's clients.

    Args:
        component: The component that logs.
        params_type: The kind of results. Default: with NVFlare's FedAvg, that of most results of the previous round.

    Attributes:
        log: Records metrics, and why results are skipped, during a run.
    """

    def __init__(self, component: FLComponent, params_type: ParamsType | None) -> None:
        self._component = component
        self.log: RoundLog | None = None
        self._params_type = params_type
        # Clients whose last result is empty because it was rejected; NVFlare's aggregators accept an empty result.
        self._emptied: set[str] = set()
        # Whether results of the round are models or differences: what each client sends, and the first accepted one.
        self._kinds: dict[str, ParamsType] = {}
        self._first_kind: ParamsType | None = None
        self._previous_kind: ParamsType | None = None

    def start_round(self) -> None:
        """Start a round, in which the first results may have another kind."""
        if self._kinds:
            self._previous_kind = majority_kind(self._kinds.values(), self._previous_kind)
        self._kinds.clear()
        self._first_kind = None

    def is_used(self, client: str, fl_ctx: FLContext) -> bool:
        """Return whether the controller or aggregator uses the last result of a client."""
        accepted = bool(fl_ctx.get_prop(AppConstants.AGGREGATION_ACCEPTED)) and client not in self._emptied
        self._emptied.discard(client)
        return accepted

    def accept(self, shareable: Any, fl_ctx: FLContext) -> None:
        """Replace what a client states by plain values, before a controller or aggregator reads it, or reject it."""
        client, running = job_context.sender_of(fl_ctx), job_context.running_aggregation(fl_ctx)
        if running.adds_encrypted:
            return
        try:
            dxo = decoded(shareable)
        except Exception as error:
            reason = f"it cannot be decoded: {type(error).__name__}: {quoted(str(error))}"
            self._reject(client or "a client", shareable, DXO(DataKind.WEIGHTS, data={}), reason, running, fl_ctx)
            return
        if not client or dxo is None or dxo.data_kind == DataKind.METRICS:
            return
        own_kind = job_context.kind_of_data(dxo.data_kind)
        if fl_ctx.get_prop(FLContextKey.TASK_NAME) == AppConstants.TASK_SUBMIT_MODEL:
            running = replace(running, by_nvflare=False, params_type=None, first_kind_wins=False)
        elif own_kind is not None:
            self._kinds.setdefault(client, own_kind)
            running = replace(running, params_type=self._params_type or running.params_type or self._kind_of(running))
        if own_kind is None and not running.by_nvflare:
            return
        try:
            result, accepted = self._accept_stated(client, dxo, running, fl_ctx)
        except ResultMismatchError as error:
            self._reject(client, shareable, dxo, str(error), running, fl_ctx)
            return
        accepted.update_shareable(shareable)
        if self.log is not None and result.metrics:
            self.log.on_metrics(client, result.metrics)
        self._emptied.discard(client)
        self._first_kind = self._first_kind or result.kind
        if result.dropped_metrics:
            self._component.log_warning(
                fl_ctx,
                f"Ignored metrics of {shown(client)} that are not finite numbers: {result.dropped_metrics}",
                fire_event=False,
            )

    def _accept_stated(
        self, client: str, dxo: DXO, running: RunningAggregation, fl_ctx: FLContext
    ) -> tuple[AcceptedResult, DXO]:
        reference = job_context.global_weights(fl_ctx)
        result = accept_result(
            client,
            dxo,
            Expectation(
                reference,
                running.exclude,
                running.params_type,
                controls=zero_controls(reference) if running.has_controls and reference else None,
                ignore_unknown=not running.by_nvflare,
                by_nvflare=running.by_nvflare,
                names=job_context.tensor_names(fl_ctx),
                in_tree=job_context.is_in_tree(fl_ctx),
            ),
        )
        if running.by_nvflare and is_encrypted(dxo):
            raise ResultMismatchError(f"the result of {shown(client)} is encrypted, or processed in another way")
        if running.ignores_zero_steps and not result.steps:
            raise ResultMismatchError(f"{shown(client)} reports 0 training steps, which have no weight")
        return result, _write_back(dxo, result, reference or {})

    def _kind_of(self, running: RunningAggregation) -> ParamsType | None:
        """Return the kind of the round if NVFlare would take that of the first result, whatever the others send."""
        return self._previous_kind or self._first_kind if running.first_kind_wins else None

    def _reject(
        self, client: str, shareable: Shareable, dxo: DXO, reason: str, running: RunningAggregation, fl_ctx: FLContext
    ) -> None:
        # Controllers skip a result without tensors, and aggregators tolerate it; none of them tolerates that reading a
        # tensor fails after half of the result is added.
        if isinstance(dxo.data, dict):
            dict.clear(dxo.data)
        self._emptied.add(client)
        kind = dxo.data_kind if job_context.kind_of_data(dxo.data_kind) else DataKind.WEIGHTS
        DXO(kind, data={}).update_shareable(shareable)
        is_submitted = fl_ctx.get_prop(FLContextKey.TASK_NAME) == AppConstants.TASK_SUBMIT_MODEL
        if is_submitted or running.has_controls:
            # Otherwise all clients would evaluate an empty model, or SCAFFOLD would end the job.
            shareable.set_return_code(ReturnCode.EXECUTION_RESULT_ERROR)
        if self.log is None or self.log.on_skip(client, reason):
            self._component.log_warning(fl_ctx, f"Rejected the result of {shown(client)}: {reason}", fire_event=False)


def decoded(result: object) -> DXO | None:
    """Return the result that NVFlare is processing, or None if it failed or is not a DXO.

    Raises:
        Exception: If its header names a DXO, and its content is not one.
    """
    if not isinstance(result, Shareable) or result.get_return_code() != ReturnCode.OK:
        return None
    _make_rounds_plain(result)
    return from_shareable(result) if result.get_header(ReservedHeaderKey.CONTENT_TYPE) == "DXO" else None


def _make_rounds_plain(result: Shareable) -> None:
    """Make the numbers of rounds that a client states integers: NVFlare compares them with its own."""
    for name in (AppConstants.START_ROUND, AppConstants.CURRENT_ROUND, AppConstants.NUM_ROUNDS):
        number = result.get_header(name)
        if number is not None and (type(number) is not int or number < 0):
            result.set_header(name, None)
    jar = result.get_cookie_jar()
    if jar is None:
        return
    if not isinstance(jar, dict):
        result.set_cookie_jar({})
    elif type(number := jar.get(AppConstants.CONTRIBUTION_ROUND)) not in (int, type(None)):
        # Not the number of any round.
        jar[AppConstants.CONTRIBUTION_ROUND] = described(number)


def _write_back(dxo: DXO, result: AcceptedResult, reference: Mapping[str, Any]) -> DXO:
    """Return the result with the accepted values instead of the received ones."""
    data, meta = dict(dict.items(dxo.data)), dict(dict.items(dxo.meta))
    if result.renamed:
        data = renamed(data, result.renamed)
        if result.controls is not None:
            stated_controls = meta[AlgorithmConstants.SCAFFOLD_CTRL_DIFF]
            meta[AlgorithmConstants.SCAFFOLD_CTRL_DIFF] = renamed(stated_controls, result.renamed)
        if result.subtree is not None:
            meta.update(result.subtree.as_meta())
    for name, entry in result.tensors.items():
        right = reference.get(name)
        if right is None:
            continue
        dtype = spec_of(right).dtype
        if entry.dtype != dtype and entry.dtype in CONVERTIBLE:
            entry = TensorEntry(CastSource(entry.rows(), entry.dtype, dtype), by_torch(dtype), entry.shape)
        elif is_array(data[name]) == is_array(right):
            continue
        data[name] = entry.array() if is_array(right) else entry.lazy()
    stated = meta.get(MetaKey.NUM_STEPS_CURRENT_ROUND)
    if stated is not None and type(stated) not in (int, float):
        meta[MetaKey.NUM_STEPS_CURRENT_ROUND] = result.steps
    metrics = meta.get(MetaKey.INITIAL_METRICS)
    if metrics is not None:
        number = None if isinstance(metrics, dict) else accept_number(metrics)
        meta[MetaKey.INITIAL_METRICS] = {**result.text_metrics, **(result.metrics or {})} if number is None else number
    return DXO(dxo.data_kind, data, meta)
