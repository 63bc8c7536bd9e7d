# SPDX-License-Identifier: Apache-2.0
"""What `LazyTensor` needs to know of torch's operators: their schemas, and which steps belong to one call.

Split off from the tensor itself because it is about torch, and about no tensor in particular.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from nvflare_lazy.tensors.lazy_tensor import LazyTensor


class OperatorTraits:
    """What the schema of an operator says about its arguments and results.

    Attributes:
        written: Position and name of each argument that the operator writes to.
        gives_views: Whether a result may share the memory of an argument.
        is_composite: Whether torch can take it apart: `to` and `reshape`, which give a view or a copy as they must,
            come in one piece in inference mode, and only their parts say which it is.
        ignores_elements: Whether the operator looks at the geometry alone.
    """

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.written = [
            (place, argument.name)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.gives_views = any(
            result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
        )
        self.is_composite: bool = func._can_decompose()
        name = schema.name.removeprefix("aten::")
        self.ignores_elements = name.startswith("new_") or name.endswith("_like")


@cache
def traits_of(func: Any) -> OperatorTraits:
    """Return the traits of an operator."""
    return OperatorTraits(func)


class SharedLoads(threading.local):
    """Lets the steps of one call to torch share what they load, so that each tensor is read once a call."""

    def __init__(self) -> None:
        self._held: dict[int, torch.Tensor] | None = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Share loads until the block is left; within another such block, do nothing."""
        if self._held is not None:
            yield
            return
        self._held = {}
        try:
            yield
        finally:
            self._held = None

    def load(self, lazy: LazyTensor) -> torch.Tensor:
        """Return the loaded tensor; nobody may write to it."""
        if self._held is None:
            return lazy.materialize()
        loaded = self._held.get(id(lazy))
        if loaded is None:
            self._held[id(lazy)] = loaded = lazy.materialize()
        return loaded
