# SPDX-License-Identifier: Apache-2.0
"""Every method and attribute that `torch.Tensor` and `np.ndarray` have, found by looking, and tried both ways.

Methods that a new release of torch or NumPy adds are tested here automatically.
"""

from __future__ import annotations

import copy
import functools
from itertools import product

import numpy as np
import pytest
import torch

from nvflare_lazy.errors import ImmutableTensorError
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.tensors.tensor_memory import storage_bytes
from tests.tensors.lazily import copied, lazy

X = torch.arange(12.0).reshape(3, 4) + 1
TENSORS = {
    "floats": X,
    "square": torch.eye(3) * 2 + 0.5,
    "vector": torch.arange(3.0),
    "integers": torch.arange(12).reshape(3, 4),
    "flags": X > 4,
    "complex": torch.complex(X, X + 1),
    "scalar": torch.tensor(2.5),
    "nothing": torch.zeros(0),
}
# Tensors among the arguments are also made lazy.
ARGUMENTS = (
    (), (2,), (1, 0), (0, 1, 2), (1.5,), (X * 0.5,), (torch.arange(3.0),), (X * 0.5, X * 0.5),
    (torch.arange(12).reshape(3, 4) % 3,), (X > 4,), (0, torch.zeros(1, 4, dtype=torch.int64)),
    (0, torch.zeros(1, 4, dtype=torch.int64), X * 0.5), (X > 4, 0.5), (torch.eye(3) + 1,), (torch.float64,), ("cpu",),
    ((2, 6),), ((3, 4), (4, 1)), (None,), (True,), ([[0, 1]],), (slice(0, 2),), ("meta",),
)  # fmt: skip

# What cannot be compared, and why.
NOT_TENSORS = {
    "__class__", "__init__", "__new__", "__init_subclass__", "__subclasshook__", "__weakref__", "__dict__", "__doc__",
    "__module__", "__annotations__", "__dir__", "__getattribute__", "__setattr__", "__delattr__", "__sizeof__",
    "__getstate__", "__torch_function__", "__torch_dispatch__",  # attributes of the class for Python and torch
    "__hash__", "_cdata", "__iter__", "data_ptr", "const_data_ptr", "_typed_storage", "storage", "untyped_storage",
    "__reduce__", "__reduce_ex__", "_reduce_ex_internal", "__dlpack__", "__deepcopy__", "_use_count",  # addresses
    "__repr__", "__str__", "__array__",  # have separate tests
    "_python_dispatch", "_neg_view",  # private to torch
    "empty_like", "new_empty", "new_empty_strided", "resize_as_sparse_",  # give memory that was never written
    "new", "index",  # `new(size)` likewise; `index` never returns for some arguments, ordinary tensors included
    "cuda", "xpu", "ipu", "mtia", "hpu", "pin_memory", "backward", "register_hook",  # need hardware, or a graph
    "quantile", "nanquantile",  # torch does not check the range of quantiles that are of another class
}  # fmt: skip


def outcome(call):
    torch.default_generator.manual_seed(5)
    try:
        return call(), None
    except Exception as error:
        return None, error


def bits(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        tensor = tensor.to_dense() if not tensor.is_quantized else tensor.int_repr()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return bytes(storage_bytes(tensor.materialize() if isinstance(tensor, LazyTensor) else tensor))


def difference(got, expected) -> str | None:
    """Say in what two results differ."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(got, torch.Tensor):
            return f"{type(got)} and no tensor"
        if (got.dtype, got.shape, got.device) != (expected.dtype, expected.shape, expected.device):
            return f"{got.dtype, got.shape, got.device} and not {expected.dtype, expected.shape, expected.device}"
        same = expected.is_meta or bits(got) == bits(expected)
        same = same or torch.allclose(got * 1, expected * 1, rtol=1e-4, atol=1e-5, equal_nan=True)
        return None if same else f"{got.tolist()} and not {expected.tolist()}"
    if isinstance(expected, np.ndarray):
        if not isinstance(got, np.ndarray) or (got.dtype, got.shape) != (expected.dtype, expected.shape):
            return f"{got!r} and not {expected!r}"
        same = np.asarray(got).tobytes() == expected.tobytes()
        same = same or (expected.dtype.kind in "fc" and np.allclose(got, expected, equal_nan=True))
        return None if same else f"{np.asarray(got)} and not {expected}"
    if isinstance(expected, (tuple, list)):
        if len(got) != len(expected):
            return f"{len(got)} and not {len(expected)} results"
        return next(filter(None, map(difference, got, expected)), None)
    return None if type(got) is type(expected) and (got == expected or got != got) else f"{got!r} and not {expected!r}"


def unlike(plain, made, expected, wrong, got, error) -> str | None:
    """Return the differences from the expected behavior: the same result, the same error, and a refused write."""
    if wrong is not None:
        if "Cannot construct a dtype from an array" in str(wrong):
            return None  # NumPy asks anything but an array for its `dtype`
        return None if error is not None else f"no error, where {wrong!r}"
    if plain is not None and bits_of(made) == bits_of(plain):
        pass
    elif isinstance(error, (ImmutableTensorError, ValueError)):
        return None  # the call wrote
    else:
        return f"a write was lost: {got!r} {error!r}"
    if error is not None:
        # Called in place, yet with nothing to write.
        return None if isinstance(error, ImmutableTensorError) or "read-only" in str(error) else f"raises {error!r}"
    return difference(got, expected)


def bits_of(value) -> tuple:
    if isinstance(value, (LazyTensor, LazyArray)):
        value = value.materialize()
    if isinstance(value, torch.Tensor):
        return bits(value), tuple(value.shape), value.dtype
    return value.tobytes(), value.shape, value.dtype


def attempt(name: str, plain, made, call, arguments, lazy_arguments) -> str | None:
    expected, wrong = outcome(lambda: call(plain, *arguments))
    got, error = outcome(lambda: call(made, *lazy_arguments))
    what = unlike(plain, made, expected, wrong, got, error)
    return what and f"{name}{arguments}: {what}"


@functools.cache
def method(name: str):
    return lambda target, *arguments: getattr(target, name)(*arguments)


@pytest.mark.filterwarnings("ignore")  # torch warns about many methods that programs do not use
@pytest.mark.parametrize("kind", TENSORS)
def test_methods_of_tensors(kind):
    """Each method with a score of arguments: the same result, no error less, and no write that goes nowhere."""
    failures = []
    for name in sorted(set(dir(torch.Tensor)) - NOT_TENSORS):
        if not callable(getattr(torch.Tensor, name)):
            continue
        for arguments in ARGUMENTS:
            lazy_arguments = [lazy(x) if isinstance(x, torch.Tensor) else x for x in arguments]
            plain, made = copied(TENSORS[kind]), lazy(TENSORS[kind])
            failures.append(attempt(name, plain, made, method(name), arguments, lazy_arguments))
    assert not list(filter(None, failures))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TENSORS)
def test_attributes_of_tensors(kind):
    """Each attribute equals the attribute of an ordinary tensor, and cannot be used to write to a lazy one."""
    failures = []
    for name in sorted(set(dir(torch.Tensor)) - NOT_TENSORS):
        if callable(getattr(torch.Tensor, name)):
            continue
        plain, made = copied(TENSORS[kind]), lazy(TENSORS[kind])
        failures.append(attempt(name, plain, made, lambda x, name=name: getattr(x, name), (), ()))
        for value in (None, X * 2):
            plain, made = copied(TENSORS[kind]), lazy(TENSORS[kind])
            assign = functools.partial(lambda x, name, value: setattr(x, name, value), name=name, value=value)
            failures.append(attempt(f"{name} =", plain, made, assign, (), ()))
    assert not list(filter(None, failures))


A = X.numpy()
ARRAYS = {
    "floats": A,
    "integers": np.arange(12).reshape(3, 4),
    "flags": A > 4,
    "complex": A + 1j,
    "scalar": np.array(2.5),
    "vector": np.arange(3.0),
    "big-endian": A.astype(">f4"),
    "records": np.zeros(2, dtype=[("a", "f4"), ("b", "i2")]),
}
ARRAY_ARGUMENTS = (
    (), (2,), (1, 0), (0,), (1.5,), (A * 0.5,), (np.arange(3.0),), (np.zeros(3, int),), (A > 4,), (np.float64,),
    ("i4",), ((2, 6),), (None,), (True,), (slice(0, 2),), ([0, 1],), ("F",), (-1,), (A * 0.5, A * 0.5),
)  # fmt: skip
NOT_ARRAYS = {
    "__class__", "__init__", "__new__", "__init_subclass__", "__subclasshook__", "__dir__", "__getattribute__",
    "__setattr__", "__delattr__", "__sizeof__", "__doc__", "__getstate__", "__class_getitem__",
    "__array_priority__", "__array_wrap__", "__array_interface__", "__array_struct__", "ctypes", "data", "flags",
    "__hash__", "__iter__", "__reduce__", "__reduce_ex__", "__repr__", "__str__", "__array__", "__deepcopy__",
    "dump", "dumps", "tofile", "flat", "base", "__dlpack__", "__array_namespace__", "__setstate__", "__buffer__",
    "__rmod__",  # formats a text, and is never called with an array
    "__pow__", "__rpow__", "__ipow__", "__complex__",  # take an argument that operators never pass
}  # fmt: skip


WITH_OUTPUT = ("choose", "clip", "conj", "conjugate", "dot", "max", "min", "round", "take")


def lazy_array(array: np.ndarray) -> LazyArray:
    return LazyArray(MemorySource(array.tobytes()), array.dtype, array.shape)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(set(ARRAYS) - {"records"}))  # arithmetic on those returns memory never written
def test_methods_of_arrays(kind):
    """The same of arrays; what writes raises our error, or NumPy's about read-only memory."""
    failures = []
    for name, arguments in product(sorted(set(dir(np.ndarray)) - NOT_ARRAYS), ARRAY_ARGUMENTS):
        if callable(getattr(np.ndarray, name)):
            lazy_arguments = [lazy_array(x) if isinstance(x, np.ndarray) else x for x in arguments]
            if name in WITH_OUTPUT:  # a lazy array to write to raises, as it should
                lazy_arguments = copy.deepcopy(arguments)
            plain, made = ARRAYS[kind].copy(), lazy_array(ARRAYS[kind])
            failures.append(attempt(name, plain, made, method(name), copy.deepcopy(arguments), lazy_arguments))
    assert not list(filter(None, failures))


@pytest.mark.parametrize("kind", ARRAYS)
def test_attributes_of_arrays(kind):
    """Attributes equal the ordinary array's; assigning to any is refused, even to `shape`, `dtype` and `flat`."""
    for name in sorted(set(dir(np.ndarray)) - NOT_ARRAYS):
        if not callable(getattr(np.ndarray, name)):
            plain, made = ARRAYS[kind].copy(), lazy_array(ARRAYS[kind])
            assert attempt(name, plain, made, lambda x, name=name: getattr(x, name), (), ()) is None
    for name in ("flat", "real", "imag", "shape", "dtype", "strides", "data", "base", "T", "flags", "anything"):
        made = lazy_array(ARRAYS[kind])
        with pytest.raises(ImmutableTensorError, match=r"call materialize\(\)"):
            setattr(made, name, 0)
        assert copy.copy(made).shape == ARRAYS[kind].shape
