# SPDX-License-Identifier: Apache-2.0
"""Optimizers of a server: the mean of the clients' updates is a gradient, and the global model takes a step along it.

After aggregation, in the walk of a round. FedAvgM is from Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data
Distribution for Federated Visual Classification, 2019, https://arxiv.org/abs/1909.06335; the others are from Reddi et
al.: Adaptive Federated Optimization, ICLR 2021, https://arxiv.org/abs/2003.00295, as in its algorithm 2.
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

#: What to do about a model that no state on the disk belongs to, though there are some.
UnknownModelPolicy = Literal["error", "restart"]


@dataclass(frozen=True)
class ServerOptimizer(ABC):
    """How the global model moves along the difference that the clients' mean makes to it.

    Computes in float64; the state is float32, and float64 for tensors of that type. It is kept on the disk, next to
    which model it belongs to. Integers and bools are not optimized: they become what the clients' mean says.

    Args:
        lr: The step along the direction.
    """

    lr: float

    name: ClassVar[str]

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"lr must be positive, not {self.lr!r}")

    @property
    @abstractmethod
    def slots(self) -> Mapping[str, float]:
        """What is remembered of each element from step to step, by name, and what it begins with."""

    @abstractmethod
    def compute_update(
        self, difference: torch.Tensor, state: Sequence[torch.Tensor], spare: torch.Tensor
    ) -> torch.Tensor:
        """Update the state, and return the direction of the step; all are float64.

        Must give the same for an element, whatever its neighbours are: so nothing fused, which rounds in one way in
        the middle of a tile and in another at its end.

        Args:
            difference: What the mean of the clients differs from the model; may be written to.
            state: The slots, in order; updated in place.
            spare: Room for what is computed on the way.

        Returns:
            One of these, which is not written to.
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

        Whenever the process is killed, the model on the disk is the old or the new one and the state that belongs to
        it is there, too: states are found by the model's own content, and that of the model before is kept.

        Args:
            model: The global model, lazy or not.
            update: The aggregate of the round. Of tensors that it lacks, the model keeps its own.
            out: The file to write; may be the one that `model` was opened from.
            state_dir: The directory of the states, for one optimizer and one model; made if it is not there. Not
                needed by an optimizer that remembers nothing.
            params_type: "FULL" if the update is a model, "DIFF" if it is the difference from one.
            keep_states: How many states are kept: one more than the number of steps that the model may have to go
                back after a restart.
            on_unknown_model: If none of the states belongs to the model, though there are some: raise "error", or
                "restart" with a new state.
            memory_budget: Bytes of memory for tiles.
            threads: How many threads; one for each core, if not given.
            max_shard_size: Split a larger model into files of at most so many bytes.
            fsync: Whether the model must survive a power failure.
            metadata: Text to store in the model.
            progress: Called now and then in this thread.
            should_cancel: Asked now and then whether to stop; what was written until then is removed.

        Raises:
            OptimizerStateError: No state belongs to the model, or they are of another optimizer.
        """
        if self.slots and state_dir is None:
            raise ValueError(f"{self.name} remembers {' and '.join(self.slots)}: say where, by state_dir")
        states = None
        if self.slots and state_dir is not None:
            states = OptimizerStates(state_dir, self.name, self.slots, keep_states)
        step = OptimizerStep(self, model, update, params_type)
        files = step.run(
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
        return LazyTensorDict.from_files(files, metadata=metadata)

    def describe(self) -> dict[str, Any]:
        """Return name and parameters, as plain values."""
        return {"name": self.name, **{field.name: getattr(self, field.name) for field in fields(self)}}


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """SGD with momentum; without momentum it needs no state, and with a step of 1 it is federated averaging.

    Args:
        lr: The step along the momentum.
        momentum: How much of the last direction is kept.
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
    """What the three adaptive optimizers share: a mean of differences, over the root of a mean of their squares.

    Args:
        lr: The step along the direction.
        beta1: How much of the mean of differences is kept.
        tau: How adaptive: what is added to the root, and the root that a state begins with.
    """

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
        """Bring the squared differences of this step into those of the steps before."""

    def compute_update(
        self, difference: torch.Tensor, state: Sequence[torch.Tensor], spare: torch.Tensor
    ) -> torch.Tensor:
        mean, square = state
        mean.mul_(self.beta1).add_(torch.mul(difference, 1 - self.beta1, out=spare))
        self.update_second_moment(square, torch.mul(difference, difference, out=spare))
        return torch.div(mean, torch.sqrt(square, out=spare).add_(self.tau), out=difference)


@dataclass(frozen=True)
class FedAdagrad(_Adaptive):
    """Adagrad: the squares of all steps add up.

    Args:
        lr: The step along the direction.
        beta1: How much of the mean of differences is kept.
        tau: How adaptive: what is added to the root, and the root that a state begins with.
    """

    beta1: float = 0.0

    name: ClassVar[str] = "fedadagrad"

    def update_second_moment(self, square: torch.Tensor, new: torch.Tensor) -> None:
        square.add_(new)


@dataclass(frozen=True)
class FedAdam(_Adaptive):
    """Adam: the squares are a running mean.

    Args:
        lr: The step along the direction.
        beta1: How much of the mean of differences is kept.
        tau: How adaptive: what is added to the root, and the root that a state begins with.
        beta2: How much of the mean of squares is kept.
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
    """Yogi: the squares move towards the new ones by an amount that does not depend on the distance.

    Its parameters are those of `FedAdam`. `beta2` is one minus the step of the squares, in multiples of the new ones.
    """

    name: ClassVar[str] = "fedyogi"

    def update_second_moment(self, square: torch.Tensor, new: torch.Tensor) -> None:
        side = torch.sub(square, new).sign_()
        square.sub_(new.mul_(1 - self.beta2).mul_(side))


_OPTIMIZERS: dict[str, type[ServerOptimizer]] = {
    optimizer.name: optimizer for optimizer in (FedAvgM, FedAdagrad, FedAdam, FedYogi)
}


def to_optimizer(optimizer: str | Mapping[str, Any] | ServerOptimizer) -> ServerOptimizer:
    """Return the optimizer that a caller or a configuration names.

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
        raise ValueError(f"there is no server optimizer {name!r}; there are {', '.join(_OPTIMIZERS)}")
    try:
        return _OPTIMIZERS[name](**parameters)
    except TypeError as error:
        raise ValueError(f"server optimizer {name!r}: {str(error).partition(' ')[2]}") from None


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and less than 1, not {value!r}")
