# SPDX-License-Identifier: Apache-2.0
"""`SwarmLearningRecipe`: swarm learning in which the clients receive, aggregate and save models on disk."""

from __future__ import annotations

from typing import Any

from nvflare.apis.dxo import DataKind
from nvflare.apis.job_def import ALL_SITES
from nvflare.app_opt.pt.recipes.swarm import SwarmLearningRecipe as StockSwarmLearningRecipe
from nvflare.client.config import ExchangeFormat

from nvflare_lazy.flare.lazy_aggregator import LazyAggregator
from nvflare_lazy.flare.tensor_offload import DEFAULT_MEMORY_BUDGET
from nvflare_lazy.recipes.options import PACKAGE, make_lazy


class SwarmLearningRecipe(StockSwarmLearningRecipe):
    """Swarm learning for PyTorch: the clients take turns to aggregate.

    Accepts all arguments that NVFlare's `SwarmLearningRecipe` accepts, and from `OffloadOptions` `checkpoint`,
    `save_pytorch`, `scratch_dir`, `scratch_quota` and `memory_budget`, which apply to each client. Two defaults differ:
    clients exchange PyTorch tensors, which training scripts get in either case, and tensors are received on disk.

    Args:
        rule: The aggregation rule; see `LazyAggregator`.
        rule_args: Arguments of the rule.

    Example:
        >>> recipe = SwarmLearningRecipe(
        ...     name="swarm",
        ...     model=Net(),
        ...     min_clients=3,
        ...     num_rounds=5,
        ...     train_script="client.py",
        ...     scratch_dir="/data/scratch",
        ... )
    """

    def __init__(
        self,
        *,
        rule: str = "mean",
        rule_args: dict[str, Any] | None = None,
        checkpoint: str | None = None,
        save_pytorch: bool = False,
        scratch_dir: str | None = None,
        scratch_quota: int | str | None = None,
        memory_budget: int | str = DEFAULT_MEMORY_BUDGET,
        install_in_trainers: bool = False,
        model: Any = None,
        initial_ckpt: str | None = None,
        aggregation_format: ExchangeFormat = ExchangeFormat.PYTORCH,
        expected_data_kind: str = DataKind.WEIGHTS,
        **arguments: Any,
    ) -> None:
        if checkpoint and initial_ckpt:
            raise ValueError("checkpoint and initial_ckpt cannot be combined; pass one initial checkpoint")
        arguments.pop("enable_tensor_disk_offload", None)
        super().__init__(
            model=model,
            initial_ckpt=checkpoint or initial_ckpt,
            aggregation_format=aggregation_format,
            expected_data_kind=expected_data_kind,
            **arguments,
        )
        # Without this, NVFlare copies the sources of the package into the job.
        self._job.set_app_packages([PACKAGE])
        components = self._job._deploy_map[ALL_SITES].app_config.components
        components["aggregator"] = LazyAggregator(
            rule=rule, rule_args=rule_args, params_type="DIFF" if expected_data_kind == DataKind.WEIGHT_DIFF else "FULL"
        )
        make_lazy(
            self,
            save_pytorch=save_pytorch,
            scratch_dir=scratch_dir,
            scratch_quota=scratch_quota,
            memory_budget=memory_budget,
            install_in_trainers=install_in_trainers,
        )
