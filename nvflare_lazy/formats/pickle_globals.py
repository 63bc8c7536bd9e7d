# SPDX-License-Identifier: Apache-2.0
"""The names that the pickle of a checkpoint may mention, and the record each of them becomes.

An allow-list: what a state dict needs, by the example of `torch.load(weights_only=True)`, and nothing else. No entry
leads to a function of torch or Python that does more than to hold data.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NoReturn

import torch

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import ForbiddenGlobalError
from nvflare_lazy.formats import pickled_numpy
from nvflare_lazy.formats.pickled_tensors import (
    AttributeBag,
    Global,
    StorageRef,
    StorageType,
    TensorRef,
    UnsupportedTensor,
    integer,
    integers,
    is_plain_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    # What the elements of quantized tensors are when nobody knows their scale.
    "QInt8Storage": "int8",
    "QInt32Storage": "int32",
    "QUInt8Storage": "uint8",
    "QUInt4x2Storage": "uint8",
    "QUInt2x4Storage": "uint8",
    "UntypedStorage": "uint8",
    "_UntypedStorage": "uint8",
}


def find_global(path: str, module: str, name: str) -> object:
    """Return the record builder or constant for a global, or raise `ForbiddenGlobalError`.

    Args:
        path: The file, for the message.
        module: The module that the pickle names.
        name: The name in it.
    """
    found = _allowed().get(f"{module}.{name}")
    if found is not None:
        return found
    if module == "torch" or module.startswith("torch."):
        if name in _STORAGE_DTYPES:
            return StorageType(name, getattr(torch, _STORAGE_DTYPES[name]))
        if name.endswith("Tensor") and f"{name.removesuffix('Tensor')}Storage" in _STORAGE_DTYPES:
            return Global(f"{module}.{name}", _nothing)
    _refuse(path, f"{module}.{name}")


def _refuse(path: str, dotted: str) -> NoReturn:
    shown = dotted if dotted.isascii() and dotted.replace(".", "_").isidentifier() else quoted(dotted)
    what = "which is not part of a state dict"
    if dotted.startswith(("torch.nn.modules.", "__main__.")):
        what = "so it is a whole pickled model, or an object of the program that saved it, and not a state dict"
    elif dotted.startswith("torch.distributed."):
        what = "so it has tensors that are spread over processes, which have to be gathered before they are saved"
    raise ForbiddenGlobalError(
        f"{path} names {shown}, {what}. Nothing of it was run. If you trust where it comes from, load it with "
        "torch.load(..., weights_only=False) where it can do no harm, and save the state dict alone, "
        "with torch.save or as safetensors"
    )


# ---- tensors ---------------------------------------------------------------------------------------------------


def _tensor(storage: object, offset: object, size: object, stride: object) -> TensorRef:
    return _typed_tensor(storage, offset, size, stride, None, None)


def _tensor_v2(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object,
    hooks: object,
    metadata: object = None,
) -> TensorRef:
    return _typed_tensor(storage, offset, size, stride, None, metadata)


def _tensor_v3(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object,
    hooks: object,
    dtype: object,
    metadata: object = None,
) -> TensorRef:
    return _typed_tensor(storage, offset, size, stride, dtype, metadata)


def _typed_tensor(
    storage: object, offset: object, size: object, stride: object, dtype: object, metadata: object
) -> TensorRef:
    if type(storage) is not StorageRef:
        raise ValueError("the storage is none")
    if dtype is not None and type(dtype) is not torch.dtype:
        raise ValueError("the dtype is none")
    bits = {"conj": False, "neg": False}
    if metadata is not None:
        if type(metadata) is not dict or not metadata.keys() <= bits.keys():
            raise ValueError("the metadata is not what torch writes")
        bits.update((name, value is True) for name, value in metadata.items())
    return TensorRef(
        storage,
        storage.dtype if dtype is None else dtype,
        integers(size, "size"),
        integers(stride, "stride"),
        integer(offset, "offset"),
        conjugated=bits["conj"],
        negated=bits["neg"],
    )


def _same_tensor(data: object, *_: object) -> TensorRef | UnsupportedTensor:
    """Return the tensor that a parameter or variable wraps; its gradient flag and hooks do not matter here."""
    if type(data) not in (TensorRef, UnsupportedTensor):
        raise ValueError("its data is not a tensor")
    return data  # type: ignore[return-value]


def _device_tensor(data: object, dtype: object, device: object, requires_grad: object) -> object:
    """Return the copy on the CPU that tensors of XLA and the like are saved as."""
    tensor = _same_tensor(data)
    return (
        tensor if tensor.dtype is dtype else UnsupportedTensor("a tensor of another device", tensor.dtype, tensor.shape)
    )


def _device_array(data: object, dtype: object, device: object, requires_grad: object) -> UnsupportedTensor:
    if type(data) is not pickled_numpy.PickledArray or type(dtype) is not torch.dtype:
        raise ValueError("its data is not an array")
    return UnsupportedTensor("a tensor of another device, saved as a NumPy array", dtype, data.array.shape)


def _from_type(func: object, tensor_type: object, arguments: object, state: object) -> object:
    """Rebuild a tensor that has attributes, which do not matter here."""
    if type(func) is not Global or not func.name.startswith("torch._utils._rebuild_"):
        raise ValueError("the function is not one that rebuilds a tensor")
    if type(tensor_type) is not Global or type(arguments) is not tuple:
        raise ValueError("the type is not a tensor's")
    return func.build(*arguments)


def _quantized(storage: object, offset: object, size: object, *_: object) -> UnsupportedTensor:
    if type(storage) is not StorageRef:
        raise ValueError("the storage is none")
    return UnsupportedTensor("a quantized tensor", storage.dtype, integers(size, "size"))


def _sparse(layout: object, data: object) -> UnsupportedTensor:
    if type(data) is not tuple or len(data) not in (3, 4):
        raise ValueError("the data is not that of a sparse tensor")
    values, size = (data[1], data[2]) if _text(layout) == "torch.sparse_coo" else (data[2], data[-1])
    return UnsupportedTensor("a sparse tensor", _same_tensor(values).dtype, integers(size, "size"))


def _nested(buffer: object, *_: object) -> UnsupportedTensor:
    tensor = _same_tensor(buffer)
    return UnsupportedTensor("a nested tensor", tensor.dtype, tensor.shape)


def _meta(dtype: object, size: object, *_: object) -> UnsupportedTensor:
    if type(dtype) is not torch.dtype:
        raise ValueError("the dtype is none")
    return UnsupportedTensor("a tensor of the meta device, which has no data", dtype, integers(size, "size"))


# ---- plain data ------------------------------------------------------------------------------------------------


def _mapping(items: object = None, *_: object) -> dict[object, object]:
    if items is None:
        return {}
    if type(items) is dict:
        return dict(items)
    if type(items) is not list or not all(type(item) in (list, tuple) and len(item) == 2 for item in items):
        raise ValueError("its items are not pairs")
    if not all(is_plain_key(key) for key, _ in items):
        raise ValueError("its keys are not text or numbers")
    return dict(items)


def _default_mapping(factory: object = None, *items: object) -> dict[object, object]:
    return _mapping(*items)


def _members(items: object) -> list[object]:
    if not isinstance(items, (list, tuple)) or not all(map(is_plain_key, items)):
        raise ValueError("its members are not text or numbers")
    return list(items)


def _set(items: object = ()) -> set[object]:
    return set(_members(items))


def _frozen_set(items: object = ()) -> frozenset[object]:
    return frozenset(_members(items))


def _encode(value: object, encoding: object = "latin1") -> bytes:
    # How Python writes bytes in protocols that have no bytes.
    if type(value) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError("it is not the text that stands for bytes")
    return value.encode("latin-1")


def _bytes(value: object = b"", encoding: object = "latin1") -> bytes:
    return value if type(value) is bytes else _encode(value, encoding)


def _byte_array(value: object = b"", encoding: object = "latin1") -> bytearray:
    return bytearray(_bytes(bytes(value) if type(value) is bytearray else value, encoding))


def _complex(real: object, imaginary: object) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise ValueError("its parts are not floats")
    return complex(real, imaginary)


def _size(items: object = ()) -> tuple[int, ...]:
    return integers(items, "size")


def _text(value: object, *_: object) -> str:
    """A device or a layout: what it is called is all that is kept of it."""
    if type(value) is not str:
        raise ValueError("its name is not text")
    return value


def _device(kind: object, index: object = None) -> str:
    return _text(kind) if index is None else f"{_text(kind)}:{integer(index, 'index')}"


def _bag() -> AttributeBag:
    return AttributeBag()


def _nothing(*_: object) -> NoReturn:
    raise ValueError("it is only a name here")


_REBUILDS: dict[str, Callable[..., object]] = {
    "_rebuild_tensor": _tensor,
    "_rebuild_tensor_v2": _tensor_v2,
    "_rebuild_tensor_v3": _tensor_v3,
    "_rebuild_parameter": _same_tensor,
    "_rebuild_parameter_with_state": _same_tensor,
    "_rebuild_qtensor": _quantized,
    "_rebuild_sparse_tensor": _sparse,
    "_rebuild_sparse_csr_tensor": _sparse,
    "_rebuild_nested_tensor": _nested,
    "_rebuild_meta_tensor_no_storage": _meta,
    "_rebuild_device_tensor_from_cpu_tensor": _device_tensor,
    "_rebuild_device_tensor_from_numpy": _device_array,
    "_rebuild_xla_tensor": _device_array,
}
_FUNCTIONS: dict[str, Callable[..., object]] = {
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.serialization._get_layout": _text,
    "_codecs.encode": _encode,
    "numpy.core.multiarray.scalar": pickled_numpy.scalar,
    "numpy._core.multiarray.scalar": pickled_numpy.scalar,
    "numpy.core.multiarray._reconstruct": pickled_numpy.PickledArray,
    "numpy._core.multiarray._reconstruct": pickled_numpy.PickledArray,
    "numpy.core.numeric._frombuffer": pickled_numpy.from_buffer,
    "numpy._core.numeric._frombuffer": pickled_numpy.from_buffer,
}
_CLASSES: dict[str, Callable[..., object]] = {
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": _default_mapping,
    "argparse.Namespace": _bag,
    "types.SimpleNamespace": _bag,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.Tensor": _nothing,
    "torch._tensor.Tensor": _nothing,
    "torch.tensor.Tensor": _nothing,
    "torch.nn.parameter.Parameter": _same_tensor,
    "torch.nn.parameter.Buffer": _same_tensor,
    "torch.autograd.variable.Variable": _same_tensor,
    "numpy.dtype": pickled_numpy.PickledDtype,
    "numpy.ndarray": _nothing,
}
_BUILTINS: dict[str, Callable[..., object]] = {
    "set": _set,
    "frozenset": _frozen_set,
    "bytes": _bytes,
    "bytearray": _byte_array,
    "complex": _complex,
    "dict": _mapping,
    "list": _nothing,
    "tuple": _nothing,
    "int": _nothing,
    "float": _nothing,
    "bool": _nothing,
    "str": _nothing,
}

_QUANTIZATION_SCHEMES = (
    "per_tensor_affine",
    "per_tensor_symmetric",
    "per_channel_affine",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)


@cache
def _allowed() -> dict[str, object]:
    table: dict[str, object] = {}
    for name, build in _REBUILDS.items():
        table[f"torch._utils.{name}"] = Global(f"torch._utils.{name}", build)
    for name, build in _FUNCTIONS.items():
        table[name] = Global(name, build)
    for name, build in _CLASSES.items():
        table[name] = Global(name, build, is_class=True)
    for name, build in _BUILTINS.items():
        # Protocols below 3 use the names that Python 2 had.
        for module in ("builtins", "__builtin__"):
            table[f"{module}.{name}"] = Global(f"builtins.{name}", build, is_class=True)
    for scheme in _QUANTIZATION_SCHEMES:
        table[f"torch.{scheme}"] = f"torch.{scheme}"
    for value in vars(torch).values():
        if type(value) is torch.dtype:
            table[str(value)] = value
    return table
