# SPDX-License-Identifier: Apache-2.0
"""`FedOptRecipe`: a server optimizer updates the global model, with its state on disk."""

from __future__ import annotations

from typing import Any

from nvflare.apis.dxo import DataKind
from nvflare.client.config import TransferType

from nvflare_lazy.flare.adaptation.component_mapping import learning_rate_schedule, server_optimizer
from nvflare_lazy.recipes.fedavg import FedAvgRecipe

_NUM_ROUNDS = "{num_rounds}"


class FedOptRecipe(FedAvgRecipe):
    """FedOpt for PyTorch.

    Accepts the arguments from `FedOptRecipe` in NVFlare and from our `FedAvgRecipe`. `optimizer_args` names one of
    these optimizers. Its state, on disk, is once or twice as large as the model.

    | `optimizer_args["path"]` | is                                                                            |
    |--------------------------|-------------------------------------------------------------------------------|
    | `torch.optim.SGD`        | the same: FedAvgM with `momentum`, federated averaging without                |
    | `torch.optim.Adam`       | FedAdam of the paper: `eps` is its tau, and the bias is not corrected         |
    | `torch.optim.Adagrad`    | FedAdagrad of the paper                                                       |

    or an optimizer of `nvflare_lazy.aggregation.server_optimizers` by name, such as `{"name": "fedyogi", "lr": 0.01}`.

    Args:
        optimizer_args: The optimizer. Default: SGD with a learning rate of 1.
        lr_scheduler_args: A scheduler of `torch.optim.lr_scheduler`, as "path" and "args".

    Example:
        >>> recipe = FedOptRecipe(
        ...     model=Net(),
        ...     min_clients=8,
        ...     train_script="client.py",
        ...     optimizer_args={"path": "torch.optim.SGD", "args": {"lr": 1.0, "momentum": 0.6}},
        ... )
    """

    def __init__(
        self,
        *,
        name: str = "fedopt",
        num_rounds: int = 2,
        optimizer_args: dict[str, Any] | None = None,
        lr_scheduler_args: dict[str, Any] | None = None,
        device: str | None = None,
        source_model: str = "model",
        server_memory_gc_rounds: int = 1,
        **arguments: Any,
    ) -> None:
        # These two are for an optimizer that holds a model; they are accepted and ignored.
        del device, source_model
        self._optimizer = server_optimizer(optimizer_args)
        if lr_scheduler_args is not None:
            schedule = self._optimizer["lr_scheduler"] = learning_rate_schedule(lr_scheduler_args)
            if schedule["args"].get("T_max") == _NUM_ROUNDS:
                schedule["args"]["T_max"] = num_rounds
        super().__init__(
            name=name,
            num_rounds=num_rounds,
            aggregator_data_kind=DataKind.WEIGHT_DIFF,
            params_transfer_type=TransferType.DIFF,
            server_memory_gc_rounds=server_memory_gc_rounds,
            **arguments,
        )

    def _server_optimizer(self) -> dict[str, Any]:
        return self._optimizer
