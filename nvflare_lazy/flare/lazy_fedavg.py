# SPDX-License-Identifier: Apache-2.0
"""`LazyFedAvg`: NVFlare's FedAvg on disk, which need not wait for all clients and resumes after a restart.

NVFlare's own controller also works with this package; this one adds settings that it does not have.
"""

from __future__ import annotations

from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.workflows.fedavg import FedAvg

from nvflare_lazy._text import logs_printably
from nvflare_lazy.flare import job_context
from nvflare_lazy.flare.lazy_aggregator import LazyAggregator


@logs_printably
class LazyFedAvg(FedAvg):
    """FedAvg whose server does not hold a model.

    Accepts the arguments from `FedAvg` in NVFlare and these. Tensors are received on disk by default, and
    `exclude_vars` and `aggregation_weights` are passed to the aggregator.

    Args:
        min_responses: Number of results to wait for in each round. Default: those of all clients.
        wait_time_after_min_received: Seconds to wait for further results after `min_responses`.
        task_timeout: Seconds after which a round continues with the results it has. Default: 0, no limit.
        aggregator: The aggregator. Default: `LazyAggregator()`.
        ignore_result_error: Whether a round continues without a client whose task failed. Default: True. With None,
            NVFlare's default, such a client ends the job if all results are required.

    If the persistor has a `checkpoint_dir`, the job resumes after the last complete round in it. `num_rounds` counts
    from the first start, so a restarted job runs the same number of rounds in total.

    Example:
        >>> {"id": "controller", "path": "nvflare_lazy.flare.LazyFedAvg",
        ...  "args": {"num_clients": 10, "num_rounds": 50, "min_responses": 8, "wait_time_after_min_received": 60}}
    """

    start_round: int
    num_rounds: int

    def __init__(
        self,
        *args: Any,
        min_responses: int | None = None,
        wait_time_after_min_received: int = 0,
        task_timeout: int = 0,
        aggregator: ModelAggregator | None = None,
        exclude_vars: str | None = None,
        aggregation_weights: dict[str, float] | None = None,
        ignore_result_error: bool | None = True,
        enable_tensor_disk_offload: bool = True,
        memory_gc_rounds: int = 1,
        **kwargs: Any,
    ) -> None:
        self._own_aggregator: LazyAggregator | None = None
        if aggregator is None:
            aggregator = self._own_aggregator = LazyAggregator(
                exclude_vars=exclude_vars, aggregation_weights=aggregation_weights
            )
        elif exclude_vars or aggregation_weights:
            name = "exclude_vars" if exclude_vars else "aggregation_weights"
            raise ValueError(f"{name} cannot be combined with aggregator; pass it to the aggregator instead")
        super().__init__(
            *args,
            aggregator=aggregator,
            exclude_vars=exclude_vars,
            aggregation_weights=aggregation_weights,
            ignore_result_error=ignore_result_error,
            enable_tensor_disk_offload=enable_tensor_disk_offload,
            memory_gc_rounds=memory_gc_rounds,
            **kwargs,
        )
        if min_responses is not None and not 1 <= min_responses <= self.num_clients:
            raise ValueError(
                f"min_responses must be between 1 and num_clients ({self.num_clients}), got {min_responses}"
            )
        self.min_responses = min_responses
        self.wait_time_after_min_received = wait_time_after_min_received
        self.task_timeout = task_timeout

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        super().handle_event(event_type, fl_ctx)
        if self._own_aggregator is not None:
            # NVFlare sends events to components of the configuration, which this one is not.
            self._own_aggregator.handle_event(event_type, fl_ctx)

    def broadcast_model(self, data: Any, **kwargs: Any) -> Any:
        """Send a model, and wait for `min_responses` results."""
        if self.min_responses is not None:
            kwargs["min_responses"] = min(self.min_responses, len(kwargs.get("targets") or ()) or self.min_responses)
            kwargs["wait_time_after_min_received"] = self.wait_time_after_min_received
        if self.task_timeout:
            kwargs["timeout"] = self.task_timeout
        return super().broadcast_model(data=data, **kwargs)

    def send_model(self, **kwargs: Any) -> None:
        """Send a model without waiting."""
        self.broadcast_model(blocking=False, **kwargs)

    def load_model(self) -> FLModel:
        """Load the initial model, or resume from the last round."""
        model = super().load_model()
        persistor = job_context.persistor_of(self.fl_ctx)
        last = persistor.resumed if persistor is not None else None
        if last is not None and last.round is not None:
            end = self.start_round + self.num_rounds
            self.start_round = max(self.start_round, last.round + 1)
            self.num_rounds = max(0, end - self.start_round)
            self.info(f"Resuming after round {last.round}; {self.num_rounds} rounds remaining.")
            self.fl_ctx.set_prop(AppConstants.START_ROUND, self.start_round, private=True, sticky=True)
        return model
