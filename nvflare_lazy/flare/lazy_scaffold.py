# SPDX-License-Identifier: Apache-2.0
"""`LazyScaffold`: NVFlare's SCAFFOLD with the global model and the control variates on disk.

Each client sends its model and the change of its control variates. The engine aggregates both over the same clients,
and adds the mean change to the global control variates tile by tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AlgorithmConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.scaffold import Scaffold

from nvflare_lazy._text import logs_printably
from nvflare_lazy.aggregation import Aggregation, AggregationReport
from nvflare_lazy.aggregation import ParamsType as ParamsKind
from nvflare_lazy.errors import NothingToAggregateError, ResultMismatchError
from nvflare_lazy.flare.accepted_result import Expectation
from nvflare_lazy.flare.apply_update import ModelUpdate
from nvflare_lazy.flare.lazy_aggregator import LazyAggregator
from nvflare_lazy.flare.model_output import ModelOutput
from nvflare_lazy.flare.weights import as_weights, holds_arrays, zero_controls
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.transport.malloc_tuning import trim_malloc

_GLOBAL_CONTROLS = AlgorithmConstants.SCAFFOLD_CTRL_GLOBAL


@logs_printably
class LazyScaffold(Scaffold):
    """Accepts the arguments from `Scaffold` in NVFlare and `memory_budget`; clients are NVFlare's.

    Args:
        memory_budget: Memory for aggregation. Default: that of `TensorOffload`.
        ignore_result_error: Whether a round continues without a client whose task failed. Default: True.

    Example:
        >>> {"id": "controller", "path": "nvflare_lazy.flare.LazyScaffold", "args": {"num_clients": 4}}
    """

    def __init__(
        self,
        *args: Any,
        memory_budget: int | str | None = None,
        ignore_result_error: bool | None = True,
        enable_tensor_disk_offload: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            *args,
            ignore_result_error=ignore_result_error,
            enable_tensor_disk_offload=enable_tensor_disk_offload,
            **kwargs,
        )
        self.memory_budget = memory_budget
        self._aggregator = _ScaffoldAggregator(memory_budget, None)
        self._update = ModelUpdate(None)

    def initialize(self, fl_ctx: FLContext) -> None:
        """Load the model, and initialize the control variates to zero."""
        # The parent would initialize them by copying the model.
        super(Scaffold, self).initialize(fl_ctx)
        self._aggregator.fl_ctx = fl_ctx
        self.model = self.load_model()
        self.model.start_round = self.start_round
        self.model.total_rounds = self.num_rounds
        self._aggregator.controls = zero_controls(self.model.params)

    @property
    def aggregator(self) -> LazyAggregator:
        """The aggregator of models and control variates."""
        return self._aggregator

    def _run_rounds(self) -> None:
        self.info("Start Scaffold.")
        for number in range(self.start_round, self.start_round + self.num_rounds):
            self.current_round = number
            self.info(f"Round {self.current_round} started.")
            self.set_fl_context(FLModel(params={}, current_round=self.current_round, total_rounds=self.num_rounds))
            self.event(AppEventType.ROUND_STARTED)
            self.model.current_round = self.current_round
            self.model.meta[_GLOBAL_CONTROLS] = self._aggregator.controls
            results = self.send_model_and_wait(targets=self.sample_clients(self.num_clients), data=self.model)
            accepted = self._accept(results)
            combined = self.aggregate(accepted, aggregate_fn=lambda _: self._aggregator.aggregate_model())
            if not combined.params:
                return  # the error is logged, and the job is being stopped
            self.model = self.update_model(self.model, combined)
            self._aggregator.update_controls(self._update, self.current_round)
            for result in results:
                result.params, result.meta = None, {}
            self.save_model(self.model)
            self._maybe_cleanup_memory()
            trim_malloc()
        self.info("Finished Scaffold.")

    def _accept(self, results: list[FLModel]) -> list[FLModel]:
        """Return the results that are accepted; the aggregator logs why others are not."""
        self._aggregator.fl_ctx = self.fl_ctx
        self._aggregator.reset_stats()
        accepted = []
        for result in results:
            try:
                self._aggregator.accept_model(result)
            except ResultMismatchError:
                continue
            accepted.append(result)
        return accepted


@logs_printably
class _ScaffoldAggregator(LazyAggregator):
    """Aggregates models and the changes of control variates: a client's result counts with both or with none."""

    def __init__(self, memory_budget: int | str | None, params_type: ParamsKind | None) -> None:
        super().__init__(memory_budget=memory_budget, params_type=params_type)
        #: The global control variates.
        self.controls: dict[str, Any] = {}
        self._mean_change = LazyTensorDict.from_entries({})
        self._counted: set[str] = set()

    def expected(self) -> Expectation:
        return replace(super().expected(), controls=self.controls)

    def _mean(self, kind: ParamsKind, base: Mapping[str, Any] | None) -> tuple[AggregationReport, LazyTensorDict]:
        while True:
            self._mean_change = self._mean_of_changes()
            report, model = super()._mean(kind, base)
            # A result may fail while its model is read; then its change of the control variates must not count either.
            if self._round.results.keys() == self._counted:
                return report, model

    def _mean_of_changes(self) -> LazyTensorDict:
        """Return the mean change of the control variates, and skip the results that fail."""
        output = ModelOutput.of(self.fl_ctx, self.controls)
        try:
            mean = Aggregation(
                memory_budget=self.budget,
                params_type="DIFF",
                on_mismatch="skip",
                on_non_finite=self.on_non_finite,
                fsync=False,
            ).run(
                self._round.controls,
                output.path,
                weights=self._round.weights,
                reference=self.controls,
                should_cancel=self._cancelled,
            )
        except NothingToAggregateError as error:
            for client, reason in error.skipped.items():
                self._drop(client, f"its control variates: {reason}")
            raise self._too_few("no usable control variates", error) from error
        for client, reason in mean.report.skipped.items():
            self._drop(client, f"its control variates: {reason}")
        self._counted = set(mean.report.contributors)
        return output.finish(mean.tensors)

    def update_controls(self, update: ModelUpdate, round_number: int) -> None:
        """Add the mean change of the round to the global control variates."""
        change, self._mean_change = self._mean_change, LazyTensorDict.from_entries({})
        moved = update.apply(self.controls, change, "DIFF", self.fl_ctx, round_number, memory_budget=self.budget)
        self.controls = as_weights(moved.entries, numpy=holds_arrays(self.controls))
