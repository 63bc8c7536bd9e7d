# SPDX-License-Identifier: Apache-2.0
"""`LazyArray`: the counterpart of `LazyTensor` for NumPy.

Jobs that exchange NumPy arrays receive these. It is a proxy and not a subclass of `np.ndarray`: C code would directly
read the memory of a subclass, which a lazy array lacks. C code rejects a proxy or converts it through `__array__`.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from nvflare_lazy.errors import UnsupportedDtypeError
from nvflare_lazy.tensors import dtypes
from nvflare_lazy.tensors._array_operators import ArrayOperators
from nvflare_lazy.tensors._undispatched_methods import raise_immutable
from nvflare_lazy.tensors.byte_source import read_elements
from nvflare_lazy.tensors.strided_source import contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from nvflare_lazy.tensors.byte_source import ByteSource
    from nvflare_lazy.tensors.lazy_tensor import LazyTensor

_WRITERS = frozenset(("fill", "itemset", "partition", "put", "resize", "setfield", "setflags", "sort"))
# Addresses of memory that would be gone by the time it is read. NumPy falls back to __array__ without them.
_RAW_MEMORY = frozenset(("__array_interface__", "__array_struct__", "ctypes"))


class LazyArray(ArrayOperators):
    """An immutable array whose elements are read from a byte source when they are used.

    Shape, dtype and the like, copies, and slices of the first axis cost no I/O. Any other use loads the array, returns
    the result of the loaded array, and releases its memory; views of it are read-only. Writing raises
    `ImmutableTensorError` or NumPy's own error about read-only memory.

    Args:
        source: The elements in row-major order.
        dtype: The element type.
        shape: The shape.

    Example:
        >>> array = LazyArray(source, np.float32, (4, 1024))
        >>> np.linalg.norm(array, axis=1)
    """

    __slots__ = ("__weakref__", "_dtype", "_shape", "_source")

    # Binary operators of ordinary arrays and of torch tensors leave the operation to us.
    __array_priority__ = 1001

    # As with LazyTensor: NVFlare's serializer uses `obj.__class__`.
    @property  # type: ignore[misc]
    def __class__(self) -> type[np.ndarray[Any, Any]]:  # type: ignore[override]
        return np.ndarray

    def __init__(self, source: ByteSource, dtype: Any, shape: Sequence[int]) -> None:
        self._dtype: np.dtype[Any] = np.dtype(dtype)
        self._shape = tuple(shape)
        if self.dtype.hasobject or not self.dtype.itemsize:
            raise UnsupportedDtypeError("arrays of Python objects, or of types without bytes, cannot be lazy")
        if min(self._shape, default=0) < 0:
            raise ValueError(f"an array cannot have the shape {self._shape}")
        if source.nbytes != self.nbytes:
            raise ValueError(f"an array of {self.shape} {self.dtype} requires {self.nbytes} bytes, got {source.nbytes}")
        self._source = source

    @classmethod
    def from_lazy_tensor(cls, tensor: LazyTensor) -> LazyArray:
        """Return the elements of a lazy tensor as a lazy array, if NumPy has its dtype."""
        row = dtypes.by_torch(tensor.dtype)
        if row.numpy is None:
            raise UnsupportedDtypeError(
                f"NumPy does not support {tensor.dtype}; use the tensor, or convert it first, for example with .float()"
            )
        return cls(tensor.source, row.numpy, tuple(tensor.shape))

    # ---- without I/O -------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type."""
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self._shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in bytes, of a row-major array."""
        return tuple(step * self.itemsize for step in contiguous_strides(self.shape))

    @property
    def source(self) -> ByteSource:
        """The elements in row-major order as bytes."""
        return self._source

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"LazyArray(shape={self.shape}, dtype={self.dtype}, in {self._source.describe()})"

    def __copy__(self) -> LazyArray:
        return LazyArray(self._source, self.dtype, self.shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyArray:
        return self.__copy__()

    # ---- reading -----------------------------------------------------------------------------------------------

    def materialize(self) -> np.ndarray[Any, Any]:
        """Load the elements into a new ordinary array, which the caller owns and may write to."""
        array = np.empty(self.shape, self.dtype)
        self._source.read_into(array.reshape(-1).view(np.uint8).data)
        return array

    def read_into(self, buffer: Buffer, start: int = 0, count: int | None = None) -> None:
        """Fill `buffer` with elements, counted in row-major order, without loading the rest.

        Args:
            buffer: Writable and C-contiguous, of `count` elements.
            start: The first element.
            count: Their number. Default: the number that the buffer holds.
        """
        read_elements(self._source, self.dtype, buffer, start, count)

    def _load(self) -> np.ndarray[Any, Any]:
        # Read-only: a write to a view of it would not change this array.
        array = self.materialize()
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("a lazy array has no memory to share; allow a copy, for example with copy=None")
        array = self.materialize() if copy else self._load()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice) and self.shape:
            start, stop, step = key.indices(self.shape[0])
            if step == 1:
                return self._rows(start, max(start, stop), (max(stop - start, 0), *self.shape[1:]))
        if isinstance(key, int) and not isinstance(key, bool) and self.ndim > 1:
            row = range(self.shape[0])[key]
            return self._rows(row, row + 1, self.shape[1:])
        return self._load()[key]

    def _rows(self, start: int, stop: int, shape: tuple[int, ...]) -> LazyArray:
        row = prod(self.shape[1:]) * self.itemsize
        return LazyArray(self._source.slice(start * row, (stop - start) * row), self.dtype, shape)

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self))) if self.ndim > 1 else iter(self._load())

    # ---- NumPy's protocols -------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, LazyArray) for x in kwargs.get("out") or ()):
            raise_immutable(f"np.{ufunc.__name__}", "array")
        if method == "at" and isinstance(inputs[0], LazyArray):
            raise_immutable(f"np.{ufunc.__name__}.at", "array")
        return getattr(ufunc, method)(*self._loaded(inputs), **self._loaded(kwargs))

    def __array_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if isinstance(kwargs.get("out"), LazyArray):
            raise_immutable(f"np.{func.__name__}", "array")
        return func(*self._loaded(args), **self._loaded(kwargs))

    def __getattr__(self, name: str) -> Any:
        if name in _WRITERS:
            raise_immutable(f".{name}()", "array")
        if name in _RAW_MEMORY:
            raise AttributeError(f"a lazy array has no memory, and therefore no {name!r}; call materialize() first")
        if not hasattr(np.ndarray, name):
            raise AttributeError(f"'LazyArray' object has no attribute {name!r}")
        if not callable(getattr(np.ndarray, name)):
            return getattr(self._load(), name)
        # Loaded when the method runs: most code only checks whether the method exists.
        return lambda *args, **kwargs: getattr(self._load(), name)(*self._loaded(args), **self._loaded(kwargs))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in LazyArray.__slots__:
            raise_immutable(f"assigning to .{name}", "array")
        super().__setattr__(name, value)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise_immutable("item assignment", "array")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
        """Load the elements as another type."""
        return self.materialize().astype(dtype, *args, **kwargs)

    def copy(self, order: Any = "C") -> np.ndarray[Any, Any]:
        """Load the elements; the same as `materialize()`, for code that also handles ordinary arrays."""
        loaded = self.materialize()
        return loaded if order == "C" else loaded.copy(order)

    def __contains__(self, item: Any) -> bool:
        return item in self._load()

    def __bool__(self) -> bool:
        return bool(self._load())

    def __int__(self) -> int:
        return int(self._load())

    def __float__(self) -> float:
        return float(self._load())

    def __complex__(self) -> complex:
        return complex(self._load())

    def __index__(self) -> int:
        return self._load().__index__()

    def __format__(self, spec: str) -> str:
        return format(self._load()[()], spec) if not self.shape else object.__format__(self, spec)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.materialize().__dlpack__(**kwargs)

    @staticmethod
    def _loaded(value: Any) -> Any:
        """Return `value` with the lazy arrays in it loaded."""
        if isinstance(value, LazyArray):
            return value._load()
        if isinstance(value, dict):
            return {key: LazyArray._loaded(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(LazyArray._loaded(item) for item in value)
        return value
