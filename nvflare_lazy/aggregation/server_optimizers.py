# SPDX-License-Identifier: Apache-2.0
"""Server optimizers: FedAvgM, FedAdagrad, FedAdam and FedYogi use the clients' mean difference as a gradient.

They run after aggregation. FedAvgM is from Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for
Federated Visual Classification, 2019, https://arxiv.org/abs/1909.06335; the others are from Reddi et al.: Adaptive
Federated Optimization, ICLR 2021, https://arxiv.org/abs/2003.00295, as in its algorithm 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from nvflare_lazy._text import parse_size
from nvflare_lazy.aggregation._engine.tile_pool import PassMonitor
from nvflare_lazy.aggregation._model_step import OptimizerStep
from nvflare_lazy.aggregation._optimizer_state import OptimizerStates
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from nvflare_lazy.aggregation._engine.tile_pool import Progress
    from nvflare_lazy.aggregation.api import ParamsType

#: Handling of a model to which none of the existing states belongs.
UnknownModelPolicy = Literal["error", "restart"]


@dataclass(frozen=True)
class ServerOptimizer(ABC):
    """Moves the global model along the difference between the clients' mean and the model.

    Computes in float64. The state is float32, or float64 for float64 tensors; it is kept on disk, together with a
    fingerprint of the model it belongs to. Integers and bools are not optimized: they take the values of the mean.

    Args:
        lr: The step size.
    """

    lr: float

    name: ClassVar[str]

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"lr must be positive, not {self.lr!r}")

    @property
    @abstractmethod
    def slots(self) -> Mapping[str, float]:
        """The values kept for each element from step to step: name and initial value."""

    @abstractmethod
    def compute_update(
        self, difference: torch.Tensor, state: Sequence[torch.Tensor], spare: torch.Tensor
    ) -> torch.Tensor:
        """Update the state, and return the direction of the step; all are float64.

        The result of an element must not depend on its neighbors. Do not use fused operations: they round differently
        in the middle of a tile and at its end.

        Args:
            difference: The clients' mean minus the model; may be overwritten.
            state: The slots, in order; updated in place.
            spare: Memory for intermediate values.

        Returns:
            One of these tensors, which is not modified.
        """

    def step(
        self,
        model: Mapping[str, Any],
        update: Mapping[str, Any],
        out: str | os.PathLike[str],
        *,
        state_dir: str | os.PathLike[str] | None = None,
        params_type: ParamsType = "FULL",
        keep_states: int = 2,
        on_unknown_model: UnknownModelPolicy = "error",
        memory_budget: int | str = "256MiB",
        threads: int | None = None,
        max_shard_size: int | str | None = None,
        fsync: bool = True,
        metadata: Mapping[str, str] | None = None,
        progress: Callable[[Progress], object] | None = None,
        should_cancel: Callable[[], bool] | None = None,
    ) -> LazyTensorDict:
        """Write the next global model and the next state.

        If the process is killed at any moment, the model on disk is either the old or the new one, and its state is on
        disk: states are found by the content of the model, and the state of the previous model is kept.

        Args:
            model: The global model, lazy or not.
            update: The aggregate of the round. Tensors that it does not have keep their values.
            out: The file to write; may be the file that `model` was opened from.
            state_dir: The directory of the states of one optimizer and one model; created if it does not exist. Not
                needed for an optimizer without state.
            params_type: "FULL" if the update is a model, "DIFF" if it is a difference from the global model.
            keep_states: Number of states to keep: one more than the number of steps by which the model may be set back
                after a restart.
            on_unknown_model: If states exist, but none belongs to the model: raise ("error"), or "restart" with a new
                state.
            memory_budget: Bytes of memory for tiles.
            threads: Number of threads. Default: one per core.
            max_shard_size: Maximum bytes of a file; a larger model is split into several files.
            fsync: Whether the model must survive a power failure.
            metadata: Text to store in the model.
            progress: Called from time to time in the calling thread.
            should_cancel: Called repeatedly; if it returns true, the step stops and its output is removed.

        Raises:
            OptimizerStateError: If no state belongs to the model, or the states are of another optimizer.
        """
        if self.slots and state_dir is None:
            raise ValueError(f"{self.name} keeps state ({', '.join(self.slots)}); pass state_dir")
        states = None
        if self.slots and state_dir is not None:
            states = OptimizerStates(state_dir, self.name, self.slots, keep_states)
        step = OptimizerStep(self, model, update, params_type)
        return step.run(
            out,
            states,
            on_unknown_model,
            budget=parse_size(memory_budget),
            threads=threads,
            max_shard_size=max_shard_size,
            fsync=fsync,
            metadata=metadata or {},
            monitor=PassMonitor(progress, should_cancel),
        )

    def describe(self) -> dict[str, Any]:
        """Return name and parameters, as plain values."""
        return {"name": self.name, **{field.name: getattr(self, field.name) for field in fields(self)}}


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """SGD with momentum. Without momentum it needs no state; with `lr=1` it is then federated averaging.

    Args:
        lr: The step size.
        momentum: The fraction of the previous direction that is kept.
    """

    lr: float = 1.0
    momentum: float = 0.9

    name: ClassVar[str] = "fedavgm"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_fraction("momentum", self.momentum)

    @property
    def slots(self) -> Mapping[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def compute_update(
        self, difference: torch.Tensor, state: Sequence[torch.Tensor], spare: torch.Tensor
    ) -> torch.Tensor:
        if not state:
            return difference
        return state[0].mul_(self.momentum).add_(difference)


@dataclass(frozen=True)
class _Adaptive(ServerOptimizer):
    """The base of the adaptive optimizers: a mean of differences, divided by the root of a mean of their squares."""

    lr: float = 0.01
    beta1: float = 0.9
    tau: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_fraction("beta1", self.beta1)
        if not self.tau > 0:
            raise ValueError(f"tau must be positive, not {self.tau!r}")

    @property
    def slots(self) -> Mapping[str, float]:
        return {"mean": 0.0, "square": self.tau**2}

    @abstractmethod
    def update_second_moment(self, square: torch.Tensor, new: torch.Tensor) -> None:
        """Combine the squared differences of this step with earlier ones, in place."""

    def compute_update(
        self, difference: torch.Tensor, state: Sequence[torch.Tensor], spare: torch.Tensor
    ) -> torch.Tensor:
        mean, square = state
        mean.mul_(self.beta1).add_(torch.mul(difference, 1 - self.beta1, out=spare))
        self.update_second_moment(square, torch.mul(difference, difference, out=spare))
        return torch.div(mean, torch.sqrt(square, out=spare).add_(self.tau), out=difference)


@dataclass(frozen=True)
class FedAdagrad(_Adaptive):
    """Adagrad: sums the squares of all steps. Accepts the parameters of `FedAdam` except `beta2`."""

    beta1: float = 0.0

    name: ClassVar[str] = "fedadagrad"

    def update_second_moment(self, square: torch.Tensor, new: torch.Tensor) -> None:
        square.add_(new)


@dataclass(frozen=True)
class FedAdam(_Adaptive):
    """Adam: keeps a running mean of the squares.

    Args:
        lr: The step size.
        beta1: The fraction of the mean of differences that is kept.
        tau: The degree of adaptivity: a constant added to the root, and the initial root.
        beta2: The fraction of the mean of squares that is kept.
    """

    beta2: float = 0.99

    name: ClassVar[str] = "fedadam"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_fraction("beta2", self.beta2)

    def update_second_moment(self, square: torch.Tensor, new: torch.Tensor) -> None:
        square.mul_(self.beta2).add_(new.mul_(1 - self.beta2))


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """Yogi: moves the squares towards the new ones by an amount that does not depend on their distance.

    Accepts the parameters of `FedAdam`. `beta2` is one minus the step of the squares, in multiples of the new ones.
    """

    name: ClassVar[str] = "fedyogi"

    def update_second_moment(self, square: torch.Tensor, new: torch.Tensor) -> None:
        side = torch.sub(square, new).sign_()
        square.sub_(new.mul_(1 - self.beta2).mul_(side))


_OPTIMIZERS: dict[str, type[ServerOptimizer]] = {
    optimizer.name: optimizer for optimizer in (FedAvgM, FedAdagrad, FedAdam, FedYogi)
}


def to_optimizer(optimizer: str | Mapping[str, Any] | ServerOptimizer) -> ServerOptimizer:
    """Return the optimizer that a caller or a configuration specifies.

    Args:
        optimizer: A name, a name with parameters, or an optimizer.

    Example:
        >>> to_optimizer({"name": "fedadam", "lr": 0.03})
        FedAdam(lr=0.03, beta1=0.9, tau=0.001, beta2=0.99)
    """
    if isinstance(optimizer, ServerOptimizer):
        return optimizer
    parameters = {"name": optimizer} if isinstance(optimizer, str) else dict(optimizer)
    name = parameters.pop("name", None)
    if name not in _OPTIMIZERS:
        raise ValueError(f"unknown server optimizer {name!r}; available: {', '.join(_OPTIMIZERS)}")
    try:
        return _OPTIMIZERS[name](**parameters)
    except TypeError as error:
        raise ValueError(f"server optimizer {name!r}: {str(error).partition(' ')[2]}") from None


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and less than 1, not {value!r}")
