# SPDX-License-Identifier: Apache-2.0
"""`FedOptRecipe`: a server optimizer updates the global model, with its state on disk."""

from __future__ import annotations

from typing import Any

from nvflare.apis.dxo import DataKind
from nvflare.client.config import TransferType

from nvflare_lazy.recipes.fedavg import FedAvgRecipe

_SGD, _ADAM, _ADAGRAD = "torch.optim.SGD", "torch.optim.Adam", "torch.optim.Adagrad"
_NUM_ROUNDS = "{num_rounds}"


class FedOptRecipe(FedAvgRecipe):
    """FedOpt for PyTorch.

    Accepts the arguments of NVFlare's `FedOptRecipe` and of our `FedAvgRecipe`. `optimizer_args` names one of these
    optimizers. Its state, on disk, is once or twice as large as the model.

    | `optimizer_args["path"]` | is                                                                            |
    |--------------------------|-------------------------------------------------------------------------------|
    | `torch.optim.SGD`        | the same: FedAvgM with `momentum`, federated averaging without                |
    | `torch.optim.Adam`       | FedAdam of the paper: `eps` is its tau, and there is no bias correction       |
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
            args = dict(lr_scheduler_args.get("args") or {})
            if args.get("T_max") == _NUM_ROUNDS:
                args["T_max"] = num_rounds
            path = lr_scheduler_args.get("path") or lr_scheduler_args["class_path"]
            # With this marker, NVFlare does not instantiate the scheduler while it reads the configuration.
            self._optimizer["lr_scheduler"] = {"path": path, "args": args, "config_type": "dict"}
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


def server_optimizer(optimizer_args: dict[str, Any] | None) -> dict[str, Any]:
    """Convert NVFlare's optimizer arguments to our server optimizer.

    Args:
        optimizer_args: A torch optimizer as "path" and "args", or one of ours as "name" and parameters.
    """
    if optimizer_args is None:
        return {"name": "fedavgm", "lr": 1.0, "momentum": 0.0, "config_type": "dict"}
    if "name" in optimizer_args:
        return {**optimizer_args, "config_type": "dict"}
    path = optimizer_args.get("path") or optimizer_args.get("class_path")
    args = dict(optimizer_args.get("args") or {})
    if path == _SGD:
        found = {"name": "fedavgm", "lr": args.pop("lr", 1e-3), "momentum": args.pop("momentum", 0.0)}
    elif path == _ADAM:
        beta1, beta2 = args.pop("betas", (0.9, 0.999))
        lr, tau = args.pop("lr", 1e-3), args.pop("eps", 1e-8)
        found = {"name": "fedadam", "lr": lr, "beta1": beta1, "beta2": beta2, "tau": tau}
    elif path == _ADAGRAD:
        found = {"name": "fedadagrad", "lr": args.pop("lr", 1e-2), "beta1": 0.0, "tau": args.pop("eps", 1e-10)}
    else:
        raise ValueError(
            f"no server optimizer for {path!r}; use {_SGD}, {_ADAM} or {_ADAGRAD}, or an optimizer by name, such as "
            '{"name": "fedyogi", "lr": 0.01}, or NVFlare\'s FedOptRecipe, which keeps the model in memory'
        )
    if args:
        raise ValueError(f"the server optimizer for {path} does not support {', '.join(sorted(args))}")
    return {**found, "config_type": "dict"}
