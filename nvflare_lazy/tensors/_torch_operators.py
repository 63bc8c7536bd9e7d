# SPDX-License-Identifier: Apache-2.0
"""The properties of operators in torch that `LazyTensor` depends on: writes, views and composites.

Separate from `lazy_tensor` because it describes torch, not a tensor.
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
# `set_` makes a tensor share the memory of the lazy one, so that writes reach it; the offsets of the others count from
# the start of the storage, wherever the tensor starts.
_NEED_THE_STORAGE = ("set_", "as_strided_copy", "as_strided_scatter", "_reshape_alias_copy")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class OperatorTraits:
    """The properties that the schema of an operator declares for its arguments and results.

    Attributes:
        returns_views: Whether a result may share the memory of an argument.
        is_composite: Whether it consists of other operators. In inference mode torch dispatches it as one, and only its
            parts declare whether they return a view (`to`, `reshape`), the tensor itself (`dropout`) or a new one.
        is_pure: Whether it only reads the elements of its arguments, and no result shares memory with them.
        reads_geometry_only: Whether the operator uses only the geometry of its first argument.
        needs_storage: Whether the operator accesses the storage of an argument, beyond the tensor.
        is_pointwise: Whether each element of a result depends on the elements at its position only.
    """

    def __init__(self, func: Any) -> None:
        schema = func._schema
        name = schema.name.removeprefix("aten::")
        self._func = func
        self._schema = schema
        self._positions = {argument.name: position for position, argument in enumerate(schema.arguments)}
        self._written = [
            argument.name
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        # Torch has more writes than its schemas declare: batch norm updates its statistics, though in training only.
        info = torch._C._SchemaInfo(schema)
        self._sometimes_written = [n for n in self._positions if info.is_mutable(n) and n not in self._written]
        if not self._written and schema.name.endswith("_") and not schema.name.endswith("__"):
            # Named like an operator that writes, but without a declaration: the operators of torch.distributed.
            self._written = list(self._positions)[:1]
        self._written_positions = [self._positions[name] for name in self._written]
        self.returns_views = any(
            result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
        ) or name.startswith(_UNDECLARED_VIEWS)
        self.is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)
        self.reads_geometry_only = name.startswith("new_") or name.endswith("_like")
        self.needs_storage = name.startswith(_NEED_THE_STORAGE)
        self.is_pointwise = torch.Tag.pointwise in func.tags
        self.is_pure = not (
            self.returns_views
            or self.is_composite
            or self.reads_geometry_only
            or self.needs_storage
            or self._written
            or self._sometimes_written
        )

    def decompose(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the operators that a composite one consists of."""
        return self._func._op_dk(_COMPOSITE, *args, **kwargs)

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the arguments of a call that it writes to."""
        if not self._sometimes_written and not kwargs:
            return [args[position] for position in self._written_positions if position < len(args)]
        given = {name: args[position] for name, position in self._positions.items() if position < len(args)} | dict(
            kwargs
        )
        names = self._written
        if self._sometimes_written:
            info = torch._C._SchemaInfo(self._schema)
            info.add_argument_values({name: value for name, value in given.items() if isinstance(value, bool)})
            names = names + [name for name in self._sometimes_written if info.is_mutable(name)]
        return [given[name] for name in names if name in given]


@cache
def operator_traits(func: Any) -> OperatorTraits:
    """Return the traits of an operator."""
    return OperatorTraits(func)


@cache
def is_pure(func: Any) -> bool:
    """Whether a function of torch only reads its arguments, and its result never shares memory with them.

    Then a call with loaded tensors has the same result, and torch's dispatcher does not have to see the lazy one. The
    first tensor subclass that it sees makes torch import `torch.distributed.tensor` and SymPy, half a second of
    processor time.
    """
    traits = _traits_of(func)
    return bool(traits) and all(each.is_pure for each in traits)


@cache
def is_pointwise(func: Any) -> bool:
    """Whether a function computes each element independently: then its results do not depend on the position in memory.

    A matrix product may: libraries choose another order of additions for memory that is not aligned.
    """
    traits = _traits_of(func)
    return bool(traits) and all(each.is_pointwise for each in traits)


def _traits_of(func: Any) -> list[OperatorTraits]:
    """Return the traits of all operators that a function of torch may call, or none if that is not known."""
    kind, _, name = getattr(func, "__qualname__", "").rpartition(".")
    packet = getattr(torch.ops.aten, name, None) if kind in ("TensorBase", "_VariableFunctionsClass") else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    overloads = [getattr(packet, overload) for overload in packet.overloads()]  # type: ignore[no-untyped-call]
    return [
        operator_traits(overload)
        for overload in overloads
        # TorchScript's own overloads, for lists and numbers, have no kernel. The caller handles `out`.
        if torch._C._dispatch_has_kernel(overload.name())
        and not any(argument.is_out for argument in overload._schema.arguments)
    ]


# A complex tensor's conjugate and its imaginary part are marked by these bits; the operation itself is still pending.
_PENDING = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor)


def pending_signs_enabled() -> AbstractContextManager[None]:
    """Let operators inside `__torch_dispatch__` see conjugates as conjugates.

    Torch disables all keys above a subclass there, including these; an operator that conjugates an intermediate result
    would then compute with the tensor itself.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _PENDING:
        excluded = excluded.remove(key)
    guard: Any = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
    return guard  # type: ignore[no-any-return]


class LoadCache(threading.local):
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
        """Return the loaded tensor, which the caller must not write to."""
        if self._held is None:
            return lazy._load()
        if id(lazy) not in self._held:
            # The lazy tensor is held as well: the id of one that is gone may be that of another one next.
            self._held[id(lazy)] = lazy, lazy._load()
        return self._held[id(lazy)][1]
