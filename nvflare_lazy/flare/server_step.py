# SPDX-License-Identifier: Apache-2.0
"""The step from one global model to the next: differences added, or an optimizer's step, in a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvflare_lazy.aggregation import ParamsType
    from nvflare_lazy.flare.outgoing import Outgoing
    from nvflare_lazy.tensors.lazy_tensor_dict import LazyTensorDict


class ServerStep:
    """Takes the step.

    Args:
        optimizer: The optimizer's name and arguments, or None to add differences as they are.
    """

    def __init__(self, optimizer: dict[str, Any] | None) -> None:
        self.optimizes = optimizer is not None

    def take(
        self,
        base: Mapping[str, Any],
        aggregate: LazyTensorDict,
        kind: ParamsType,
        outgoing: Outgoing,
        round_number: int | None,
        *,
        memory_budget: int | str,
    ) -> LazyTensorDict:
        """Return the next global model, in a file of its own."""
        raise NotImplementedError
