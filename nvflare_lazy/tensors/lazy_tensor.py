# SPDX-License-Identifier: Apache-2.0
"""`LazyTensor`: a real `torch.Tensor` with a shape and a dtype whose elements are somewhere else.

What aggregators, filters and persistors get to see of a model that was never loaded. Torch itself says, in the schema
of every operator, which arguments are written and which results are views; so there is no list of operators here that
could be incomplete: views stay lazy, writes raise, and everything else is done on the loaded tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch.utils._pytree import tree_map

from nvflare_lazy.errors import ImmutableTensorError
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.lazy_storage import LazyStorage
from nvflare_lazy.tensors.operators import SharedLoads, traits_of
from nvflare_lazy.tensors.raw_bytes import extent, storage_bytes
from nvflare_lazy.tensors.strided_source import (
    StridedSource,
    check_geometry,
    contiguous_strides,
    is_contiguous,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer

    from nvflare_lazy.tensors.byte_source import ByteSource

aten = torch.ops.aten
_CPU = torch.device("cpu")
_META = torch.device("meta")


class LazyTensor(torch.Tensor):
    """An immutable tensor whose elements are read from a byte source when, and as far as, they are used.

    Shape, dtype and the like cost no I/O, nor do views (`t[3]`, `t.view(-1)`, `t.T`) or copies. Any other use loads
    the tensor, gives what the loaded tensor would give, and lets it go again. Writing to it raises
    `ImmutableTensorError`.

    Args:
        source: The storage the geometry refers to.
        dtype: The element type.
        shape: The shape.
        strides: Strides in elements, or None for a row-major tensor.
        storage_offset: First element in the storage.

    Example:
        >>> tensor = LazyTensor(FileSource(file, 4096, 1 << 30), torch.float32, (16384, 16384))
        >>> tensor[7].sum()  # reads one row
    """

    _storage_: LazyStorage

    # NVFlare's serializer goes by `obj.__class__`: so a lazy tensor is sent as the tensor it stands for, and a peer
    # without this package can take it. `type()` and `isinstance(x, LazyTensor)` still tell what it is.
    @property  # type: ignore[misc]
    def __class__(self) -> type[torch.Tensor]:  # type: ignore[override]
        return torch.Tensor

    @staticmethod
    def __new__(
        cls: type[LazyTensor],
        source: ByteSource,
        dtype: torch.dtype,
        shape: Sequence[int],
        *,
        strides: Sequence[int] | None = None,
        storage_offset: int = 0,
    ) -> LazyTensor:
        shape = tuple(shape)
        strides = contiguous_strides(shape) if strides is None else tuple(strides)
        check_geometry(source, dtype.itemsize, shape, strides, storage_offset)
        return _make(LazyStorage(source), dtype, shape, strides, storage_offset)

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Take what `__new__` takes; torch's own constructor must not see it."""

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> LazyTensor:
        """Return a read-only lazy view of an ordinary tensor's memory; nothing is copied."""
        if isinstance(tensor, LazyTensor):
            return tensor
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        return cls(MemorySource(storage_bytes(tensor)), tensor.dtype, tensor.shape, strides=tensor.stride())

    # ---- reading -----------------------------------------------------------------------------------------------

    def materialize(self) -> torch.Tensor:
        """Load the elements into a new ordinary tensor, which the caller owns and may write to."""
        shape, strides, offset = _geometry(self)
        if _is_sparse_view(shape, strides):
            strides = contiguous_strides(shape)
            loaded = torch.empty_strided(shape, strides, dtype=self.dtype)
            self.source.read_into(storage_bytes(loaded))
        else:
            loaded = torch.empty_strided(shape, strides, dtype=self.dtype)
            self._storage_.source.read_into(storage_bytes(loaded), offset * self.dtype.itemsize)
        return loaded

    def read_into(self, buffer: Buffer, start: int = 0, count: int | None = None) -> None:
        """Fill `buffer` with elements, counted in row-major order, without loading the rest.

        Args:
            buffer: Writable and C-contiguous, of `count` elements.
            start: The first element.
            count: How many; as many as the buffer holds, if not given.
        """
        view = memoryview(buffer).cast("B")
        if count is None:
            count = len(view) // self.dtype.itemsize
        if count * self.dtype.itemsize != len(view):
            raise ValueError(f"a buffer of {len(view)} bytes does not hold exactly {count} elements of {self.dtype}")
        self.source.read_into(view, start * self.dtype.itemsize)

    @property
    def source(self) -> ByteSource:
        """The elements in row-major order as bytes; a plain part of a file wherever they lie in one like that."""
        shape, strides, offset = _geometry(self)
        itemsize, storage = self.dtype.itemsize, self._storage_.source
        if is_contiguous(shape, strides):
            nbytes = self.numel() * itemsize
            return storage.slice(offset * itemsize if nbytes else 0, nbytes)
        return StridedSource(storage, itemsize, shape, strides, offset)

    # ---- what torch asks ---------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        handler = _OUTSIDE_THE_DISPATCHER.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        with _loads.shared(), torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates its own without `func`
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return _CPU
        kwargs = kwargs or {}
        traits = traits_of(func)
        for place in traits.written:
            written = args[place[0]] if place[0] < len(args) else kwargs.get(place[1])
            if _holds_lazy(written):
                _refuse_write(str(func))
        if traits.gives_views and isinstance(args[0], LazyTensor):
            if traits.is_composite:
                return func.decompose(*args, **kwargs)
            return _lazy_view(func, args, kwargs)
        if func is aten.clone.default and not kwargs and args[0].is_contiguous():
            return args[0].materialize()
        if func is aten.copy_.default and _can_fill(args[0], args[1]):
            args[1].read_into(storage_bytes(args[0]))
            return args[0]
        load = _stand_in if traits.ignores_elements else _loads.load
        return func(
            *tree_map(lambda x: load(x) if isinstance(x, LazyTensor) else x, args),
            **tree_map(lambda x: load(x) if isinstance(x, LazyTensor) else x, kwargs),
        )

    # ---- what does not go through torch's dispatcher -----------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype}, in {self._storage_.source.describe()})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __copy__(self) -> LazyTensor:
        return self._share(self._storage_)

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTensor:
        # Nothing can be written, so nothing needs to be copied. A storage of its own keeps pointers apart, though.
        storage = memo.get(id(self._storage_))
        if storage is None:
            memo[id(self._storage_)] = storage = LazyStorage(self._storage_.source)
        return self._share(storage)

    def _share(self, storage: LazyStorage) -> LazyTensor:
        twin = _make(storage, self.dtype, *_geometry(self))
        for name, value in self.__dict__.items():
            if name != "_storage_":
                setattr(twin, name, value)
        return twin.requires_grad_(self.requires_grad)  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickles are read where the file is not: they hold the elements.
        loaded = self.materialize()
        if getattr(self, "_is_param", False):
            loaded = torch.nn.Parameter(loaded, self.requires_grad)
        return loaded.requires_grad_(self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """Load the elements as a NumPy array; read-only, since a write would not reach the tensor it came from."""
        array = self.materialize().requires_grad_(self.requires_grad).numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("a lazy tensor has no memory to share: a copy is needed to make an array of it")
        array = self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)
        return array.copy() if copy and not array.flags.writeable else array

    def tolist(self) -> Any:
        """Load the elements as nested lists."""
        return self.materialize().tolist()

    def data_ptr(self) -> int:
        """Load the storage for good and return the address of the first element."""
        return self._pinned_tensor().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Load the storage for good and return it."""
        return self._storage_.pin()

    def _typed_storage(self) -> torch.TypedStorage:
        storage: torch.TypedStorage = self._pinned_tensor()._typed_storage()  # type: ignore[no-untyped-call]
        return storage

    def storage(self) -> Any:
        """Load the storage for good and return it."""
        return self._pinned_tensor().storage()  # type: ignore[no-untyped-call]

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._pinned_tensor().requires_grad_(self.requires_grad).__dlpack__(**kwargs)

    def new_tensor(self, data: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """Return a new ordinary tensor of this dtype."""
        return torch.empty(0, dtype=self.dtype).new_tensor(data, **kwargs)

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """Return a new ordinary tensor of this dtype, by torch's oldest constructor."""
        made: torch.Tensor = torch.empty(0, dtype=self.dtype).new(*args, **kwargs)
        return made

    def _pinned_tensor(self) -> torch.Tensor:
        shape, strides, offset = _geometry(self)
        return torch.empty(0, dtype=self.dtype).set_(self._storage_.pin(), offset, shape, strides)


def _make(
    storage: LazyStorage,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    storage_offset: int,
) -> LazyTensor:
    # On the meta device, for torch's own eyes: `parameter.data = lazy` copies the inside of a tensor without asking,
    # which torch refuses to do across devices; between two tensors "on the CPU" it would copy a null pointer.
    # An inference tensor cannot be the base of a view made outside of inference mode: so never make one.
    with torch.inference_mode(False):
        tensor: LazyTensor = torch.Tensor._make_wrapper_subclass(
            LazyTensor,
            shape,
            strides=strides,
            storage_offset=storage_offset,
            dtype=dtype,
            device=_META,
            dispatch_device=True,
        )
    tensor._storage_ = storage
    return tensor


def _geometry(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _is_sparse_view(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a view skips so much of its storage that its elements are better gathered than loaded with the gaps."""
    return extent(shape, strides) > 2 * int(np.prod(shape, dtype=object))


def _refuse_write(what: str) -> NoReturn:
    raise ImmutableTensorError(
        f"{what} would write to a lazy tensor, whose elements are in a file that others read too: "
        "call materialize() on it and write to the tensor that returns"
    )


def _holds_lazy(value: object) -> bool:
    return isinstance(value, LazyTensor) or (isinstance(value, (list, tuple)) and any(map(_holds_lazy, value)))


def _can_fill(target: torch.Tensor, lazy: object) -> bool:
    """Whether `target.copy_(lazy)` is a plain read: this is how a state dict loads without a second copy."""
    return (
        isinstance(lazy, LazyTensor)
        and target.dtype == lazy.dtype
        and target.shape == lazy.shape
        and target.device.type == "cpu"
        and target.is_contiguous()
        and not target.is_neg()
        and not target.is_conj()
        and type(target) in (torch.Tensor, torch.nn.Parameter)
    )


def _stand_in(lazy: LazyTensor) -> torch.Tensor:
    """Return memory of the same geometry that was never touched, for operators that only look at the geometry."""
    shape, strides, _ = _geometry(lazy)
    return torch.empty_strided(shape, strides, dtype=lazy.dtype)


def _lazy_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let torch work out the geometry of a view on a tensor without memory, and lay it over the lazy storage."""
    base: LazyTensor = args[0]
    shape, strides, offset = _geometry(base)
    whole = torch.empty(offset + extent(shape, strides), dtype=base.dtype, device="meta")
    view = func(whole.as_strided(shape, strides, offset), *args[1:], **kwargs)

    def lay(meta: Any) -> Any:
        if not isinstance(meta, torch.Tensor):
            return meta
        check_geometry(base._storage_.source, meta.dtype.itemsize, *_geometry(meta))
        return _make(base._storage_, meta.dtype, *_geometry(meta))

    if any(isinstance(x, torch.Tensor) and (x.is_conj() or x.is_neg()) for x in _flat(view)):
        return LazyTensor.from_tensor(func(_loads.load(base), *args[1:], **kwargs))
    return tree_map(lay, view)


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


_loads = SharedLoads()


def _refuse(name: str) -> Callable[..., NoReturn]:
    return lambda *args, **kwargs: _refuse_write(name)


def _set_data(target: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(target, LazyTensor):
        _refuse_write("assigning to .data")
    target.data = value.materialize() if isinstance(value, LazyTensor) else value


# Torch's own functions that reach for memory without an operator; called unbound, they land here.
_OUTSIDE_THE_DISPATCHER: dict[Any, Callable[..., Any]] = {
    getattr(torch.Tensor, name): getattr(LazyTensor, name)
    for name in (
        "__array__",
        "__deepcopy__",
        "__dlpack__",
        "__format__",
        "__reduce_ex__",
        "__repr__",
        "_typed_storage",
        "data_ptr",
        "new",
        "new_tensor",
        "numpy",
        "storage",
        "tolist",
        "untyped_storage",
    )
} | {
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    **{getattr(torch.Tensor, name): _refuse(name) for name in ("apply_", "map_", "map2_", "share_memory_")},
}
