# SPDX-License-Identifier: Apache-2.0
"""`ScaffoldRecipe`: SCAFFOLD with the global model and the control variates on disk."""

from __future__ import annotations

from typing import Any

from nvflare_lazy.flare.lazy_scaffold import LazyScaffold
from nvflare_lazy.recipes.fedavg import FedAvgRecipe

# Arguments of FedAvgRecipe that SCAFFOLD would ignore.
_FEDAVG_ONLY_ARGS = (
    *("rule", "rule_args", "aggregator", "exclude_vars", "aggregation_weights"),
    *("min_responses", "wait_time_after_min_received", "task_timeout", "stop_cond", "patience"),
)


class ScaffoldRecipe(FedAvgRecipe):
    """SCAFFOLD for PyTorch.

    Accepts the arguments from `ScaffoldRecipe` in NVFlare and from `OffloadOptions`. Training scripts use NVFlare's
    `PTScaffoldHelper`.

    Example:
        >>> recipe = ScaffoldRecipe(model=Net(), min_clients=4, num_rounds=10, train_script="client.py")
    """

    def __init__(self, *, name: str = "scaffold", **arguments: Any) -> None:
        for unknown in _FEDAVG_ONLY_ARGS:
            if arguments.get(unknown) is not None:
                raise TypeError(f"SCAFFOLD does not support {unknown}: it has its own rule and waits for all clients")
        super().__init__(name=name, **arguments)

    def _get_model_aggregator(self) -> None:
        return None

    def _create_controller(self, persistor_id: str, model_params: Any, model_aggregator: Any) -> LazyScaffold:
        return LazyScaffold(
            num_clients=self.min_clients,
            num_rounds=self.num_rounds,
            persistor_id=persistor_id,
            memory_gc_rounds=self.server_memory_gc_rounds,
            memory_budget=self.options.memory_budget,
        )
