# SPDX-License-Identifier: Apache-2.0
"""`LazyScaffold`: NVFlare's SCAFFOLD with the global model and the control variates on disk.

Each client sends its model and the change of its control variates. The engine aggregates both, and adds the mean change
to the global control variates tile by tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AlgorithmConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.scaffold import Scaffold

from nvflare_lazy.aggregation import Aggregation
from nvflare_lazy.errors import ResultMismatchError
from nvflare_lazy.flare import job_context
from nvflare_lazy.flare.apply_update import ModelUpdate
from nvflare_lazy.flare.lazy_aggregator import LazyAggregator
from nvflare_lazy.flare.malloc_tuning import trim_malloc
from nvflare_lazy.flare.model_output import ModelOutput
from nvflare_lazy.flare.result_validation import client_of, find_mismatch, steps_of
from nvflare_lazy.flare.weights import as_weights, entries_of, holds_arrays
from nvflare_lazy.tensors.byte_source import ZeroSource
from nvflare_lazy.transport.failed import failure_of

_GLOBAL_CONTROLS = AlgorithmConstants.SCAFFOLD_CTRL_GLOBAL
_CONTROL_DIFF = AlgorithmConstants.SCAFFOLD_CTRL_DIFF


class LazyScaffold(Scaffold):
    """Accepts the arguments of NVFlare's `Scaffold` and `memory_budget`; clients are NVFlare's.

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
        self._aggregator = LazyAggregator(memory_budget=memory_budget)
        self._update = ModelUpdate(None)

    def initialize(self, fl_ctx: FLContext) -> None:
        """Load the model, and initialize the control variates to zero."""
        # The parent would initialize them by copying the model.
        super(Scaffold, self).initialize(fl_ctx)
        self._aggregator.fl_ctx = fl_ctx
        self.model = self.load_model()
        self.model.start_round = self.start_round
        self.model.total_rounds = self.num_rounds
        zeros = {
            name: entry.over(ZeroSource(entry.source.nbytes)) for name, entry in entries_of(self.model.params).items()
        }
        self._controls: dict[str, Any] = as_weights(zeros, numpy=holds_arrays(self.model.params))

    def _run_rounds(self) -> None:
        self.info("Start Scaffold.")
        for number in range(self.start_round, self.start_round + self.num_rounds):
            self.current_round = number
            self.info(f"Round {self.current_round} started.")
            self.set_fl_context(FLModel(params={}, current_round=self.current_round, total_rounds=self.num_rounds))
            self.event(AppEventType.ROUND_STARTED)
            self.model.current_round = self.current_round
            self.model.meta[_GLOBAL_CONTROLS] = self._controls
            results = self.send_model_and_wait(targets=self.sample_clients(self.num_clients), data=self.model)
            changes = self._take(results)
            combined = self.aggregate(results, aggregate_fn=lambda _: self._aggregator.aggregate_model())
            if not combined.params:
                return  # the error is logged, and the job is being stopped
            self.model = self.update_model(self.model, combined)
            self._controls = self._next_controls(changes)
            for result in results:
                result.params, result.meta = None, {}
            self.save_model(self.model)
            self._maybe_cleanup_memory()
            trim_malloc()
        self.info("Finished Scaffold.")

    def _take(self, results: list[FLModel]) -> dict[str, tuple[dict[str, Any], float]]:
        """Accept the valid results, and return the change of the control variates and the weight of each client."""
        self._aggregator.fl_ctx = self.fl_ctx
        self._aggregator.reset_stats()
        changes = {}
        for result in list(results):
            client = client_of(result)
            change = (result.meta or {}).get(_CONTROL_DIFF)
            try:
                if not isinstance(change, dict):
                    raise ResultMismatchError(
                        f"{client} did not send meta[{_CONTROL_DIFF!r}]: its script must use NVFlare's PTScaffoldHelper"
                    )
                wrong = failure_of(change) or find_mismatch(change, self._controls)
                if wrong is not None:
                    raise ResultMismatchError(f"the control variates of {client} do not match the model: {wrong}")
                self._aggregator.accept_model(result)
            except ResultMismatchError as error:
                self.warning(f"Round {self.current_round}: skipped the result of {client}: {error}")
                log = job_context.round_log_of(self.fl_ctx)
                if log is not None:
                    log.on_skip(client, str(error))
                results.remove(result)
            else:
                changes[client] = (change, steps_of(result))
        return changes

    def _next_controls(self, changes: Mapping[str, tuple[dict[str, Any], float]]) -> dict[str, Any]:
        """Return the global control variates after the round."""
        output = ModelOutput.of(self.fl_ctx, self._controls)
        budget = self._aggregator.budget
        mean = Aggregation(memory_budget=budget, params_type="DIFF", on_mismatch="skip", fsync=False).run(
            {client: change for client, (change, _) in changes.items()},
            output.path,
            weights={client: weight for client, (_, weight) in changes.items()},
            reference=self._controls,
        )
        change = output.finish(mean.tensors)
        moved = self._update.apply(
            self._controls, change, "DIFF", self.fl_ctx, self.current_round, memory_budget=budget
        )
        return as_weights(moved.entries, numpy=holds_arrays(self._controls))
