# SPDX-License-Identifier: Apache-2.0
"""What `LazyTensor` needs to know of torch's operators: their schemas, and which steps belong to one call.

Split off from the tensor itself because it is about torch, and about no tensor in particular.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from nvflare_lazy.tensors.lazy_tensor import LazyTensor


# Their results share memory, though autograd is told that they do not.
_UNDECLARED_VIEWS = ("unsafe_split", "unsafe_chunk", "_unsafe_view")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class OperatorTraits:
    """What the schema of an operator says about its arguments and results.

    Attributes:
        gives_views: Whether a result may share the memory of an argument.
        is_composite: Whether it is nothing but other operators. In inference mode these come in one piece, and only
            their parts say whether they give a view (`to`, `reshape`), the tensor itself (`dropout`) or a new one.
        ignores_elements: Whether the operator looks at the geometry of its first argument alone.
    """

    def __init__(self, func: Any) -> None:
        schema = func._schema
        name = schema.name.removeprefix("aten::")
        self._func = func
        self._schema = schema
        self._places = {argument.name: place for place, argument in enumerate(schema.arguments)}
        self._written = [
            argument.name
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        # Torch knows of more writes than its schemas say: batch norm updates its statistics, though in training only.
        info = torch._C._SchemaInfo(schema)
        self._written_at_times = [n for n in self._places if info.is_mutable(n) and n not in self._written]
        if not self._written and schema.name.endswith("_") and not schema.name.endswith("__"):
            # Named as one that writes, yet nothing declared: so it is with torch.distributed's.
            self._written = list(self._places)[:1]
        self._written_places = [self._places[name] for name in self._written]
        self.gives_views = any(
            result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
        ) or name.startswith(_UNDECLARED_VIEWS)
        self.is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)
        self.ignores_elements = name.startswith("new_") or name.endswith("_like")

    def take_apart(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the operators that a composite one consists of."""
        return self._func._op_dk(_COMPOSITE, *args, **kwargs)

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the arguments of a call that it writes to."""
        if not self._written_at_times and not kwargs:
            return [args[place] for place in self._written_places if place < len(args)]
        given = {name: args[place] for name, place in self._places.items() if place < len(args)} | dict(kwargs)
        names = self._written
        if self._written_at_times:
            info = torch._C._SchemaInfo(self._schema)
            info.add_argument_values({name: value for name, value in given.items() if isinstance(value, bool)})
            names = names + [name for name in self._written_at_times if info.is_mutable(name)]
        return [given[name] for name in names if name in given]


@cache
def traits_of(func: Any) -> OperatorTraits:
    """Return the traits of an operator."""
    return OperatorTraits(func)


# What a complex tensor's conjugate and its imaginary part are made of: bits that say what is still to be done.
_PENDING = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor)


def pending_signs_minded() -> AbstractContextManager[None]:
    """Let operators inside of `__torch_dispatch__` see conjugates as conjugates.

    Torch switches off there whatever stands above a subclass, this too; an operator that takes a conjugate on its way
    would then compute with the tensor itself.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _PENDING:
        excluded = excluded.remove(key)
    guard: Any = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
    return guard  # type: ignore[no-any-return]


class SharedLoads(threading.local):
    """Lets the steps of one call to torch share what they load, so that each tensor is read once a call."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[LazyTensor, torch.Tensor]] | None = None

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
            return lazy._load()
        if id(lazy) not in self._held:
            # The lazy tensor is held as well: the id of one that is gone may be that of another one next.
            self._held[id(lazy)] = lazy, lazy._load()
        return self._held[id(lazy)][1]
