# SPDX-License-Identifier: Apache-2.0
"""The methods of `LazyTensor` that torch does not dispatch: copies, pickles, NumPy, pointers, printing.

Each is written out because torch's own method accesses memory that a lazy tensor does not have. `lazy_tensor` holds
everything that torch does dispatch.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from nvflare_lazy.errors import ImmutableTensorError
from nvflare_lazy.tensors._storage import Geometry, LazyStorage
from nvflare_lazy.tensors.tensor_memory import new_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from typing_extensions import Self

_CPU = torch.device("cpu")


def raise_immutable(what: str, kind: str = "tensor") -> NoReturn:
    """Raise the error for an operation, in the words of the caller, that would write to a tensor or array."""
    raise ImmutableTensorError(
        f"{what} would write to a lazy {kind}, which is read-only because other readers share its file; "
        f"call materialize() and write to the {kind} that it returns"
    )


class UndispatchedMethods(torch.Tensor):
    """The base class of `LazyTensor`: the methods that load the tensor without torch's dispatcher."""

    _geometry_: Geometry

    if TYPE_CHECKING:

        def materialize(self) -> torch.Tensor:
            """Load the elements into a new ordinary tensor."""

        def _over(self, storage: LazyStorage) -> Self:
            """Return the same geometry over another storage."""

        def _pinned_tensor(self) -> torch.Tensor:
            """Load the storage for good and return an ordinary tensor that shares its memory."""

    # ---- inspection: no I/O, except where the elements themselves are requested ------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype}, in {self._geometry_.storage.source.describe()})"
        )

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def tolist(self) -> Any:
        """Load the elements as nested lists."""
        return self.materialize().tolist()

    # ---- copies: no I/O either ---------------------------------------------------------------------------------

    def __copy__(self) -> Self:
        return self._share(self._geometry_.storage)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if not self.is_leaf:
            raise RuntimeError("cannot copy a tensor that is the result of a computation; detach() it first")
        # Nothing can be written, so nothing needs to be copied. A separate storage keeps the pointers of both apart.
        storage = memo.get(id(self._geometry_.storage))
        if storage is None:
            memo[id(self._geometry_.storage)] = storage = LazyStorage(self._geometry_.storage.source)
        twin = self._share(storage)
        twin.__dict__.update(copy.deepcopy(self._attributes(), memo))
        twin.grad = copy.deepcopy(self.grad, memo)
        return twin

    def _share(self, storage: LazyStorage) -> Self:
        twin = self._over(storage)
        twin.__dict__.update(self._attributes())
        twin.requires_grad_(self.requires_grad)
        return twin

    def _attributes(self) -> dict[str, Any]:
        """Return the attributes that other code has set on the tensor."""
        return {name: value for name, value in self.__dict__.items() if name != "_geometry_"}

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle may be read where the file does not exist, so it contains the elements.
        loaded = self.materialize()
        attributes = self._attributes()
        if attributes.pop("_is_param", False):
            loaded = torch.nn.Parameter(loaded, self.requires_grad)
        loaded.__dict__.update(attributes)
        return loaded.requires_grad_(self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    # ---- NumPy -------------------------------------------------------------------------------------------------

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """Load the elements as a NumPy array; read-only, since a write would not reach the tensor."""
        loaded = self.materialize()
        if self.requires_grad:
            loaded.requires_grad_()
        array = loaded.numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("a lazy tensor has no memory to share; allow a copy, for example with copy=None")
        array = self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)
        return array.copy() if copy and not array.flags.writeable else array

    # ---- pointers: after the first one, the elements stay loaded ------------------------------------------------

    def data_ptr(self) -> int:
        """Load the storage for good and return the address of the first element."""
        return self._pinned_tensor().data_ptr()

    const_data_ptr = data_ptr

    def __dlpack_device__(self) -> Any:
        return new_memory(self.dtype, (0,)).__dlpack_device__()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Load the storage for good and return it."""
        return self._geometry_.storage.pin()

    def _typed_storage(self) -> torch.TypedStorage:
        storage: torch.TypedStorage = self._pinned_tensor()._typed_storage()  # type: ignore[no-untyped-call]
        return storage

    def storage(self) -> Any:
        """Load the storage for good and return it."""
        return self._pinned_tensor().storage()  # type: ignore[no-untyped-call]

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._pinned_tensor().requires_grad_(self.requires_grad).__dlpack__(**kwargs)

    # ---- factories, which would return lazy tensors otherwise ---------------------------------------------------

    def new_tensor(self, data: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """Return a new ordinary tensor of this dtype."""
        return new_memory(self.dtype, (0,)).new_tensor(data, **kwargs)

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """Return a new ordinary tensor of this dtype, by torch's oldest constructor."""
        made: torch.Tensor = new_memory(self.dtype, (0,)).new(*args, **kwargs)
        return made


def _raising(name: str) -> Callable[..., NoReturn]:
    return lambda *args, **kwargs: raise_immutable(name)


def _set_data(target: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(target, UndispatchedMethods):
        if isinstance(value, UndispatchedMethods) and value._geometry_ == target._geometry_:
            return  # as `module.cpu()` does where nothing changes
        raise_immutable("assigning to .data")
    target.data = value.materialize() if isinstance(value, UndispatchedMethods) else value


def _device(*_: Any) -> Any:
    return _CPU


# Unbound calls of functions in torch are redirected to these.
HANDLERS: dict[Any, Callable[..., Any]] = {
    getattr(torch.Tensor, name): getattr(UndispatchedMethods, name)
    for name in (
        "__array__",
        "__deepcopy__",
        "__dlpack__",
        "__dlpack_device__",
        "__format__",
        "__reduce_ex__",
        "__repr__",
        "_typed_storage",
        "const_data_ptr",
        "data_ptr",
        "new",
        "new_tensor",
        "numpy",
        "storage",
        "tolist",
        "untyped_storage",
    )
    if hasattr(torch.Tensor, name)
} | {
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__: _device,
    **{getattr(torch.Tensor, name): _raising(name) for name in ("apply_", "map_", "map2_", "share_memory_")},
}
