# SPDX-License-Identifier: Apache-2.0
"""`LazyTensor`: a real `torch.Tensor` with a shape and a dtype whose elements are read on use.

Aggregators, filters and persistors see a model as these tensors. The schema of each torch operator declares which
arguments it writes and which results are views, so no list of operators here can be incomplete: views stay lazy,
writes raise, and everything else runs on the loaded tensor.
"""

from __future__ import annotations

from contextlib import nullcontext
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from nvflare_lazy.errors import UnsupportedTensorError
from nvflare_lazy.tensors import dtypes
from nvflare_lazy.tensors._parallel_read import MIN_SHARED_BYTES
from nvflare_lazy.tensors._storage import Geometry, LazyStorage
from nvflare_lazy.tensors._torch_operators import (
    LoadCache,
    OperatorTraits,
    is_pointwise,
    is_pure,
    operator_traits,
    pending_signs_enabled,
)
from nvflare_lazy.tensors._undispatched_methods import HANDLERS, UndispatchedMethods, raise_immutable
from nvflare_lazy.tensors.byte_source import MemorySource, read_elements
from nvflare_lazy.tensors.strided_source import (
    StridedSource,
    check_geometry,
    contiguous_strides,
    is_contiguous,
)
from nvflare_lazy.tensors.tensor_memory import (
    borrowed_bytes,
    extent,
    new_memory,
    owned_bytes,
    storage_bytes,
    torch_is_watched,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer

    from nvflare_lazy.tensors.byte_source import ByteSource

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_CLONE = aten.clone.default
_COPY = aten.copy_.default
_CPU = torch.device("cpu")
_META = torch.device("meta")
_CLONE_METHOD = torch.Tensor.clone
_COPY_METHOD = torch.Tensor.copy_
_AS_IT_IS = nullcontext()
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


class LazyTensor(UndispatchedMethods):
    """An immutable tensor whose elements are read from a byte source when, and as far as, they are used.

    Shape, dtype and the like cost no I/O, nor do views (`t[3]`, `t.view(-1)`, `t.T`) or copies. Any other use loads
    the tensor, returns the result of the loaded tensor, and releases its memory. Writing to it raises
    `ImmutableTensorError`.

    Args:
        source: The storage the geometry refers to. With a tensor, lazy or not, the result is what `torch.nn.Parameter`
            returns for it.
        dtype: The element type.
        shape: The shape.
        strides: Strides in elements, or None for a row-major tensor.
        storage_offset: First element in the storage.
        requires_grad: Only for a parameter.

    Attributes:
        file_path: The file, for a tensor from `LazyTensorDict.make_lazy_ref`. Default: None.
        key: Its name in that file, or None.

    Example:
        >>> tensor = LazyTensor(FileSource(file, 4096, 1 << 30), torch.float32, (16384, 16384))
        >>> tensor[7].sum()  # reads one row
    """

    file_path: str | None = None
    key: str | None = None

    # NVFlare's serializer uses `obj.__class__`: so a lazy tensor is sent as an ordinary tensor, and a peer without this
    # package can receive it. `type()` and `isinstance(x, LazyTensor)` still identify it.
    @property  # type: ignore[override]
    def __class__(self) -> type[torch.Tensor]:
        return torch.Tensor

    @__class__.setter
    def __class__(self, other: type) -> None:
        raise_immutable("turning it into another tensor")  # what `torch.utils.swap_tensors` does

    @staticmethod
    def __new__(
        cls: type[LazyTensor],
        source: ByteSource | torch.Tensor,
        dtype: torch.dtype | None = None,
        shape: Sequence[int] | None = None,
        *,
        strides: Sequence[int] | None = None,
        storage_offset: int = 0,
        requires_grad: bool = False,
    ) -> LazyTensor:
        if isinstance(source, torch.Tensor):
            # A parameter may be lazy, and accelerate replaces a parameter by `type(parameter)(value, requires_grad=…)`.
            return torch.nn.Parameter(source, requires_grad)  # type: ignore[return-value]
        if dtype is None or shape is None:
            raise TypeError("LazyTensor() requires a byte source, a dtype and a shape")
        dtypes.by_torch(dtype)  # raises for types that no file holds, such as quantized ones
        shape = tuple(shape)
        if strides is None:
            row_major = contiguous_strides(shape)
            check_geometry(source, dtype.itemsize, shape, row_major, storage_offset)
            return _make(Geometry(LazyStorage(source), dtype, shape, row_major, storage_offset, is_plain=True))
        return _make(_checked_geometry(LazyStorage(source), dtype, shape, tuple(strides), storage_offset))

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Accept the arguments of `__new__`; torch's own constructor must not see them."""

    @classmethod
    def of_whole(cls, source: ByteSource, dtype: torch.dtype, shape: tuple[int, ...]) -> LazyTensor:
        """Return the row-major tensor that a source consists of, unchecked: for readers that have checked it."""
        dtypes.by_torch(dtype)
        return _make(Geometry(LazyStorage(source), dtype, shape, contiguous_strides(shape), 0, True))

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> LazyTensor:
        """Return a read-only lazy view of an ordinary tensor's memory; nothing is copied."""
        if isinstance(tensor, LazyTensor):
            return tensor
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            raise UnsupportedTensorError(
                "a sparse, quantized, nested or meta tensor has no dense elements; convert it with to_dense() first"
            )
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        return cls(MemorySource(storage_bytes(tensor)), tensor.dtype, tensor.shape, strides=tensor.stride())

    # ---- reading -----------------------------------------------------------------------------------------------

    def materialize(self) -> torch.Tensor:
        """Load the elements into a new ordinary tensor, which the caller owns and may write to."""
        _, dtype, shape, strides, _, is_plain = self._geometry_
        if is_plain or extent(shape, strides) >= prod(shape):
            return self._load()
        # An expanded view: its elements share memory, and writing to one would change the others.
        loaded = new_memory(dtype, shape)
        self.source.read_into(storage_bytes(loaded))
        return loaded

    def _load(self) -> torch.Tensor:
        """Load the elements for reading only: an expanded view keeps its small memory."""
        storage, dtype, shape, strides, offset, is_plain = self._geometry_
        count = prod(shape)
        reached = count if is_plain else extent(shape, strides)
        # A view that skips most of its storage is better put together than loaded with the gaps; but not where
        # autograd goes by the strides of this tensor, which the loaded one has to have then.
        gathered = reached > 2 * count and not self.requires_grad
        loaded = new_memory(dtype, shape, None if is_plain or gathered else strides)
        if gathered:
            self.source.read_into(storage_bytes(loaded))
        elif count:
            itemsize = dtype.itemsize
            _fill(loaded, reached * itemsize, storage.source, offset * itemsize)
        return loaded

    def _map(self) -> torch.Tensor | None:
        """Return a tensor over a mapping of the file, valid while this one exists, or None if it must be loaded."""
        storage, dtype, shape, _, offset, is_plain = self._geometry_
        found = storage.source.file_range() if is_plain else None
        if found is None:
            return None
        file, start = found
        start += offset * dtype.itemsize
        memory = file.map(start, prod(shape) * dtype.itemsize) if start % dtype.itemsize == 0 else None
        return None if memory is None else torch.frombuffer(memory, dtype=dtype).view(shape)

    def read_into(self, buffer: Buffer, start: int = 0, count: int | None = None) -> None:
        """Fill `buffer` with elements, counted in row-major order, without loading the rest.

        Args:
            buffer: Writable and C-contiguous, of `count` elements.
            start: The first element.
            count: Their number. Default: the number that the buffer holds.
        """
        read_elements(self.source, self._geometry_.dtype, buffer, start, count)

    @property
    def source(self) -> ByteSource:
        """The row-major bytes of the elements: a plain part of the file if they are stored in this order."""
        storage, dtype, shape, strides, offset, is_plain = self._geometry_
        itemsize, source = dtype.itemsize, storage.source
        if is_plain:
            nbytes = prod(shape) * itemsize
            return source.slice(offset * itemsize if nbytes else 0, nbytes)
        return StridedSource(source, itemsize, shape, strides, offset)

    # ---- torch's protocols -------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _CLONE_METHOD and _is_simple_clone(args, kwargs):
            return args[0].materialize()
        if func is _COPY_METHOD and _is_simple_copy(args, kwargs):
            torch.autograd.graph.increment_version(args[0])
            return _copied(args[0], args[1])
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if len(types) > 1 or types[0] is not LazyTensor:
            others = tuple(other for other in types if not issubclass(LazyTensor, other))
            if others:
                # Other subclasses take part: they define the result of an operation with an ordinary tensor.
                answers = (other.__torch_function__(func, others, args, kwargs) for other in others)  # type: ignore[attr-defined]
                return next((answer for answer in answers if answer is not NotImplemented), NotImplemented)
        with _loads.shared(), torch._C.DisableTorchFunctionSubclass():
            if kwargs.get("out") is not None:
                # For arguments of a subclass, torch may compute a new result and ignore `out`.
                if _holds_lazy(kwargs["out"]):
                    raise_immutable(f"{func.__name__}(out=...)")
                args, kwargs = _replaced((args, kwargs), _load_with_gradient)
            elif is_pure(func) and not torch_is_watched() and not _needs_gradient((args, kwargs)):
                args, kwargs = _replaced((args, kwargs), _load_to_read if is_pointwise(func) else _loads.load)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates its own without `func`
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE:
            return _CPU
        kwargs = kwargs or {}
        traits = operator_traits(func)
        if _holds_lazy(traits.written(args, kwargs)):
            raise_immutable(str(func))
        if func is _CLONE and not kwargs and args[0]._geometry_.is_plain:
            return args[0].materialize()
        if func is _COPY and _can_fill(args[0], args[1]):
            return _copied(args[0], args[1])
        with pending_signs_enabled():
            return cls._call(func, traits, args, kwargs)

    @classmethod
    def _call(cls, func: Any, traits: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if traits.is_composite:
            return traits.decompose(args, kwargs)
        if traits.returns_views and isinstance(args[0], LazyTensor):
            return _lazy_view(func, args, kwargs)
        if traits.reads_geometry_only and isinstance(args[0], LazyTensor):
            args = (_stand_in(args[0]), *args[1:])
        load = LazyTensor._pinned_tensor if traits.needs_storage else _loads.load
        return func(*_replaced(args, load), **_replaced(kwargs, load))

    # ---- parts ------------------------------------------------------------------------------------------------

    def _over(self, storage: LazyStorage) -> LazyTensor:
        return _make(self._geometry_._replace(storage=storage))

    def _pinned_tensor(self) -> torch.Tensor:
        storage, dtype, shape, strides, offset, _ = self._geometry_
        return new_memory(dtype, (0,)).set_(storage.pin(), offset, shape, strides)


def _checked_geometry(
    storage: LazyStorage, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> Geometry:
    check_geometry(storage.source, dtype.itemsize, shape, strides, offset)
    return Geometry(storage, dtype, shape, strides, offset, is_plain=is_contiguous(shape, strides))


def _make(geometry: Geometry) -> LazyTensor:
    # Torch itself sees the meta device: `parameter.data = lazy` copies the internals of a tensor without dispatch,
    # which torch refuses to do across devices; between two tensors "on the CPU" it would copy a null pointer.
    # An inference tensor cannot be the base of a view made outside inference mode: so never make one.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS:
        tensor: LazyTensor = torch.Tensor._make_wrapper_subclass(
            LazyTensor,
            geometry.shape,
            strides=geometry.strides,
            storage_offset=geometry.offset,
            dtype=geometry.dtype,
            device=_META,
            dispatch_device=True,
            _extra_dispatch_keys=_AUTOCAST,
        )
    # C code that takes the address of the memory without asking gets an error, and no null pointer.
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    tensor._geometry_ = geometry
    return tensor


def _replaced(value: Any, load: Callable[[LazyTensor], torch.Tensor]) -> Any:
    return tree_map(lambda x: load(x) if isinstance(x, LazyTensor) else x, value)


def _holds_lazy(value: object) -> bool:
    return isinstance(value, LazyTensor) or (isinstance(value, (list, tuple)) and any(map(_holds_lazy, value)))


def _is_simple_clone(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a clone is only a read that no mode, tracer or gradient observes: then torch does not have to run."""
    if len(args) != 1 or kwargs or not args[0]._geometry_.is_plain or torch_is_watched():
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return not args[0].requires_grad


def _is_simple_copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `copy_` is a plain read into memory that no mode, tracer or gradient observes."""
    if len(args) != 2 or kwargs or torch_is_watched() or torch.is_grad_enabled():
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return not args[0].is_inference() and _can_fill(*args)


def _copied(target: torch.Tensor, lazy: LazyTensor) -> torch.Tensor:
    if target.nbytes:
        _fill(target, target.nbytes, lazy.source)
    return target


def _needs_gradient(value: Any) -> bool:
    """Whether autograd records an operation with these arguments: it may keep them, and lazy ones take no memory."""
    return torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in torch.utils._pytree.tree_leaves(value)
    )


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


def _load_to_read(lazy: LazyTensor) -> torch.Tensor:
    """Return the elements for a pointwise operator, whose result does not share their memory.

    Without a copy, the next operator follows at once. OpenMP's threads wait for it in a loop of some milliseconds: a
    client's processor time was a fifth longer with a copy between the operators.
    """
    mapped = lazy._map()
    return _loads.load(lazy) if mapped is None else mapped


def _load_with_gradient(lazy: LazyTensor) -> torch.Tensor:
    return lazy.clone() if lazy.requires_grad else _loads.load(lazy)


def _fill(memory: torch.Tensor, nbytes: int, source: ByteSource, offset: int = 0) -> None:
    """Read into the first bytes of a tensor's memory."""
    if nbytes < MIN_SHARED_BYTES and source.file_range() is not None:
        # Read by this thread alone, which keeps the tensor alive until then.
        source.read_into(borrowed_bytes(memory, nbytes), offset)
    else:
        # Other threads may write a moment longer than this one, if this one is interrupted.
        source.read_into(owned_bytes(memory, nbytes), offset)


def _stand_in(lazy: LazyTensor) -> torch.Tensor:
    """Return memory of the same geometry that was never touched, for operators that only look at the geometry."""
    _, dtype, shape, strides, *_ = lazy._geometry_
    return new_memory(dtype, shape, strides)


def _lazy_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let torch work out the geometry of a view on a tensor without memory, and lay it over the lazy storage."""
    base: LazyTensor = args[0]
    storage, dtype, shape, strides, offset, _ = base._geometry_
    whole = torch.empty(offset + extent(shape, strides), dtype=dtype, device="meta")
    view = func(whole.as_strided(shape, strides, offset), *args[1:], **kwargs)

    def lay(meta: Any) -> Any:
        if not isinstance(meta, torch.Tensor):
            return meta
        shape, strides, offset = tuple(meta.shape), meta.stride(), int(meta.storage_offset())
        return _make(_checked_geometry(storage, meta.dtype, shape, strides, offset))

    if any(isinstance(x, torch.Tensor) and (x.is_conj() or x.is_neg()) for x in _flat(view)):
        return LazyTensor.from_tensor(func(_loads.load(base), *args[1:], **kwargs))
    return tree_map(lay, view)


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


_loads = LoadCache()
