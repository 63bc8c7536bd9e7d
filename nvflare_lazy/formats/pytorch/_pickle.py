# SPDX-License-Identifier: Apache-2.0
"""Unpickles PyTorch checkpoints into records of where tensors are, and plain data; nothing in a file is ever run.

The only module that uses `torch._weights_only_unpickler`, which is private, for its list of names. Only functions of
this module are ever called. Names that are not known are never imported: objects of such classes become
`OpaqueObject`s, or the file is refused.
"""

from __future__ import annotations

import re
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import _weights_only_unpickler as weights_only
from torch.storage import UntypedStorage

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import ForbiddenGlobalError, NVFlareLazyError, PyTorchCheckpointError
from nvflare_lazy.formats.pytorch._machine import PickleMachine

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvflare_lazy.formats.pytorch._stream import PickleStream

# torch counts bytes in 63 bits.
_MAX_STORAGE_BYTES = 1 << 62
_MAX_DIMENSIONS = 64
_INTEGER = frozenset((int,))
_MAX_KEY_LEN = 8
_MAX_TUPLE_KEYS = 4096
# Below it an integer is its own hash, so no file can choose many that collide.
_LARGEST_KEY = 1 << 60
# About what a call and its result, an item of a list, and one of a dict take.
_CALL_BYTES, _SLOT_BYTES, _ITEM_BYTES = 320, 16, 64
# What a function may make of each item of an argument.
_WEIGHTS: dict[type, int] = {dict: 64, list: 64, tuple: 64, str: 4, bytes: 1, bytearray: 1}


class StorageRef(NamedTuple):
    """A storage of the file, or a part of one.

    Attributes:
        key: The storage's key in the file.
        dtype: Its element type; `torch.uint8` for untyped storages.
        offset: First byte.
        nbytes: Number of bytes from there.
        total: Bytes of the whole storage according to the pickle.
    """

    key: str
    dtype: torch.dtype
    offset: int
    nbytes: int
    total: int


def storage_dtype(storage_type: object) -> torch.dtype:
    """Return the element type of a class of storages, or raise ValueError."""
    if storage_type is UntypedStorage:
        return torch.uint8
    if type(storage_type) is not torch.serialization.StorageType:
        raise ValueError("its type is not a storage class")
    dtype: torch.dtype = storage_type.dtype
    return dtype


def storage_ref(storage_type: object, key: object, numel: object, view: object = None) -> StorageRef:
    """Return the storage that a persistent id describes, or raise ValueError.

    Args:
        storage_type: The class of the storage.
        key: Its key in the file.
        numel: Number of elements of the whole storage.
        view: None, or (key of the view, first element, number of elements) in old files.
    """
    dtype = storage_dtype(storage_type)
    if type(key) is not str:
        raise ValueError("its key is not text")
    offset, count = 0, numel
    if view is not None:
        if type(view) is not tuple or len(view) != 3:
            raise ValueError("it is a view of something that is not described")
        _, offset, count = view
    if type(numel) is not int or type(offset) is not int or type(count) is not int:
        raise ValueError("its number of elements is not an integer")
    if min(offset, count) < 0 or offset + count > numel or numel * dtype.itemsize > _MAX_STORAGE_BYTES:
        raise ValueError(f"elements {offset} to {offset + count} exceed its {numel} elements")
    return StorageRef(key, dtype, offset * dtype.itemsize, count * dtype.itemsize, numel * dtype.itemsize)


class TensorView(NamedTuple):
    """A strided tensor over a storage of the file; its numbers may be nonsense."""

    storage: StorageRef
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    conjugated: bool = False
    negated: bool = False


@dataclass(frozen=True, slots=True)
class UnsupportedTensor:
    """A tensor without dense elements in the file."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(slots=True, eq=False, repr=False)
class OpaqueObject:
    """An object of a class that is not imported, or the class itself.

    Attributes:
        name: The dotted name of the class or function.
        arguments: The arguments of the call that would make it.
        states: What would be given to it afterwards: attributes or items.
    """

    name: str
    arguments: tuple[object, ...] = ()
    states: list[object] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<{self.name}, not loaded>"

    def attributes(self) -> dict[object, object] | None:
        """Return the attributes of a namespace, or None for any other object."""
        state = self.states[0] if len(self.states) == 1 else None
        return state if self.name in _NAMESPACES and isinstance(state, dict) else None


@dataclass(slots=True, eq=False, repr=False)
class _Function:
    """The meaning of an allowed name: a function of this module. Nothing else is ever called."""

    name: str
    run: Callable[..., object]

    def __repr__(self) -> str:
        return self.name


def unpickle(stream: PickleStream, load_id: Callable[[object], object]) -> object:
    """Return the contents of the next pickle of a stream.

    Args:
        stream: The stream.
        load_id: Returns the storage or tensor for a persistent id, or raises ValueError.
    """
    try:
        return _Unpickler(stream, load_id).run()
    except (NVFlareLazyError, MemoryError):
        raise
    except Exception as error:  # of any kind: functions run with values of the file
        what = "too few values" if isinstance(error, IndexError) else str(error)[:200]
        raise PyTorchCheckpointError(
            f"{stream.path}: invalid pickle ({what}); the file is damaged, or contains more than a state dict"
        ) from None


class _Unpickler(PickleMachine):
    def __init__(self, stream: PickleStream, load_id: Callable[[object], object]) -> None:
        super().__init__(stream)
        self._load_id = load_id
        self._tuple_keys = 0

    def find(self, module: object, name: object) -> object:
        return _find(self._stream, module, name)

    def load_id(self, persistent_id: object) -> object:
        return self._load_id(persistent_id)

    def call(self, called: object, arguments: object) -> object:
        if type(arguments) is not tuple:
            raise ValueError("a call without a tuple of arguments")
        if arguments:
            # A function copies its arguments at most once, whatever else shares them.
            nbytes = _CALL_BYTES
            for argument in arguments:
                if type(argument) in _WEIGHTS:
                    nbytes += _WEIGHTS[type(argument)] * len(argument)
            self._stream.spend(nbytes)
        if type(called) is OpaqueObject:
            return OpaqueObject(called.name, arguments)
        if type(called) is not _Function:
            raise ValueError(f"a call of {type(called).__name__}")
        return called.run(*arguments)

    def build(self, target: object, state: object) -> object:
        if type(target) is OpaqueObject:
            target.states.append(state)
        elif isinstance(target, (TensorView, UnsupportedTensor)):
            # A parameter's gradient flag and hooks, or attributes; four or five items would be another tensor.
            if type(state) is tuple and len(state) > 3:
                raise ValueError("a tensor that is replaced by its own state")
        elif (
            type(target) is not dict
        ):  # for dicts: attributes of an OrderedDict, such as the `_metadata` of a state dict
            raise ValueError(f"a state for a {type(target).__name__}")
        return target

    def fill(self, kind: Any, target: Any, items: list[object]) -> Any:
        self._stream.spend((_SLOT_BYTES if kind is list else _ITEM_BYTES) * len(items))
        if type(target) is OpaqueObject:
            target.states.append(tuple(items))
        elif type(target) is not kind:
            raise ValueError(f"items for a {type(target).__name__}, which is not a {kind.__name__}")
        elif kind is list:
            target.extend(items)
        elif kind is set:
            target.update(self._checked_keys(items))
        elif len(items) % 2:
            raise ValueError("a key without a value")
        else:
            target.update(zip(self._checked_keys(items[::2]), items[1::2], strict=True))
        return target

    def _checked_keys(self, keys: list[object]) -> list[object]:
        for key in keys:
            if _is_plain_key(key):
                continue
            # Tuples that collide are easily made; this number of them costs less than a second.
            self._tuple_keys += 1
            if self._tuple_keys > _MAX_TUPLE_KEYS or not _is_short_tuple(key):
                raise ValueError(
                    f"a {type(key).__name__} as a key; keys must be text, numbers, bytes, dtypes or None, or a few "
                    "tuples of them"
                )
        return keys


def _is_plain_key(key: object) -> bool:
    """Whether a dict or set may hold `key`: hashing it is quick, and no file can choose many that collide."""
    if type(key) is int:
        return -_LARGEST_KEY < key < _LARGEST_KEY
    return type(key) in (str, bytes, bool, float, type(None), torch.dtype)


def _is_short_tuple(key: object) -> bool:
    return type(key) is tuple and len(key) <= _MAX_KEY_LEN and all(map(_is_plain_key, key))


# ---- names -----------------------------------------------------------------------------------------------------

_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
# Data of the standard library and NumPy that trainers save, and that becomes opaque. Nothing else of them and of torch
# may be named. Names of other packages may: nothing of them is imported either.
_DATA = re.compile(
    r"argparse\.Namespace|types\.SimpleNamespace|collections\.deque"
    r"|(datetime|decimal|fractions|pathlib(\._local)?|uuid)\.\w+"
    r"|builtins\.(list|tuple|int|float|bool|str|slice|range)"
    r"|numpy\.(dtype|ndarray|dtypes\.\w+|_?core\.(multiarray|numeric)\.(_reconstruct|scalar|_frombuffer))"
    r"|numpy\.(bool_?|u?int\d+|float\d+|complex\d+|random\.(_pickle|mtrand|_mt19937)\.\w+)"
)
_FIRST_PARTY = sys.stdlib_module_names | {"torch", "numpy", "nvflare_lazy"}


def _find(stream: PickleStream, module: object, name: object) -> object:
    """Return what a name means, or raise the error that it may not be used."""
    if type(module) is not str or type(name) is not str:
        raise ValueError("a global whose name is not text")
    stream.spend(_ITEM_BYTES + 4 * (len(module) + len(name)))
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    dotted = f"{module}.{name}"
    names = _names()
    if dotted in names:
        return names[dotted]
    # Storages and tensors of devices and of old versions have the names of today's, in other modules.
    today = f"torch.{name.rpartition('.')[2].removeprefix('_')}"
    if module.partition(".")[0] == "torch" and name.endswith(("Storage", "Tensor")) and today in names:
        return names[today]
    if _DATA.fullmatch(dotted) or dotted.partition(".")[0] not in _FIRST_PARTY:
        return OpaqueObject(dotted)
    refuse(stream.path, dotted)


def refuse(path: str, dotted: str) -> NoReturn:
    """Raise the error for a name that a checkpoint may not use."""
    shown = dotted if dotted.isascii() and dotted.replace(".", "_").isidentifier() else quoted(dotted)
    what = "which is not part of a state dict"
    if dotted.startswith(("torch.nn.modules.", "__main__.")):
        what = "so it is a whole pickled model, or an object of the program that saved it, and not a state dict"
    elif dotted.startswith("torch.distributed."):
        what = "so it has tensors that are spread over processes, which have to be gathered before they are saved"
    raise ForbiddenGlobalError(
        f"{path} names {shown}, {what}. No code of it was run. If you trust where it comes from, load it with "
        "torch.load(..., weights_only=False) where it can do no harm, and save the state dict alone, "
        "with torch.save or as safetensors"
    )


@cache
def _names() -> dict[str, object]:
    """Return what names mean: torch's constants and classes, which are never called, and functions of this module."""
    allowed = weights_only._get_allowed_globals()
    constants = torch.dtype, torch.qscheme, torch.serialization.StorageType, type
    names = {name: value for name, value in allowed.items() if isinstance(value, constants)}
    return names | {name: _Function(name, run) for name, run in (_REBUILDS | _FUNCTIONS).items()}


# ---- functions that replace torch's and Python's ---------------------------------------------------------------


def _tensor(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    _: object = None,
    __: object = None,
    metadata: object = None,
) -> TensorView:
    if type(storage) is not StorageRef or type(offset) is not int:
        raise ValueError("a tensor without a storage or an offset")
    shape, strides = _sizes(size), _sizes(stride)
    if len(shape) != len(strides):
        raise ValueError(f"a tensor with {len(shape)} sizes and {len(strides)} strides")
    flags = metadata if type(metadata) is dict else {}
    return TensorView(
        storage, storage.dtype, shape, strides, offset, flags.get("conj") is True, flags.get("neg") is True
    )


def _tensor_with_dtype(*arguments: Any) -> TensorView:
    *geometry, dtype = arguments[:7]
    if type(dtype) is not torch.dtype:
        raise ValueError("a tensor with something else as its dtype")
    return _tensor(*geometry, *arguments[7:])._replace(dtype=dtype)


def _same_tensor(data: object, *_: object) -> object:
    """Return the tensor that a parameter or variable wraps; its gradient flag and hooks are not needed."""
    if not isinstance(data, (TensorView, UnsupportedTensor)):
        raise ValueError("its data is not a tensor")
    return data


def _from_type(function: object, tensor_type: object, arguments: object, state: object) -> object:
    """Rebuild a tensor that has attributes, which are not needed."""
    if type(function) is not _Function or function.name not in _REBUILDS or type(tensor_type) is OpaqueObject:
        raise ValueError("a tensor of a class or function that is not torch's")
    if type(arguments) is not tuple:
        raise ValueError("a call without a tuple of arguments")
    return function.run(*arguments)


def _device_tensor(data: Any, dtype: object, *_: object) -> object:
    """Return the copy on the CPU that tensors of XLA and other devices are saved as."""
    _same_tensor(data)
    return data if data.dtype is dtype else _unsupported("a tensor of another device", data.dtype, data.shape)


def _device_array(data: Any, dtype: object, *_: object) -> UnsupportedTensor:
    return _unsupported("a tensor of another device, saved as a NumPy array", dtype, data.states[0][1])


def _quantized(storage: Any, offset: object, size: object, *_: object) -> UnsupportedTensor:
    dtype = torch.int32 if storage.dtype is torch.qint32 else torch.uint8
    return _unsupported("a quantized tensor", dtype, size)


def _sparse(layout: object, data: Any) -> UnsupportedTensor:
    values, size = (data[1], data[2]) if layout is torch.sparse_coo else (data[2], data[3])
    return _unsupported("a sparse tensor", values.dtype, size)


def _nested(buffer: Any, *_: object) -> UnsupportedTensor:
    return _unsupported("a nested tensor", buffer.dtype, buffer.shape)


def _meta(dtype: object, size: object, *_: object) -> UnsupportedTensor:
    return _unsupported("a tensor of the meta device, which has no data", dtype, size)


def _unsupported(kind: str, dtype: object, size: object) -> UnsupportedTensor:
    if type(dtype) is not torch.dtype:
        raise ValueError("a tensor with something else as its dtype")
    return UnsupportedTensor(kind, dtype, _sizes(size))


def _sizes(size: Any) -> tuple[int, ...]:
    if type(size) not in (tuple, list, torch.Size) or len(size) > _MAX_DIMENSIONS:
        raise ValueError("a tensor without a size, or with too many dimensions")
    if not _INTEGER.issuperset(map(type, size)):
        raise ValueError("a size of a tensor that is not an integer")
    return tuple(size)


def _with_plain(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function that gives `function` numbers and text only."""

    def call(*arguments: object) -> object:
        if not all(type(argument) in (str, int, float) for argument in arguments):
            raise ValueError("its arguments are not numbers or text")
        return function(*arguments)

    return call


def _mapping(items: object = None, *_: object) -> dict[object, object]:
    if items is None:
        return {}
    if type(items) is dict:
        return dict(items)
    if type(items) is not list or not all(type(item) in (list, tuple) and len(item) == 2 for item in items):
        raise ValueError("its items are not pairs")
    _plain_keys([key for key, _ in items])
    return dict(items)


def _plain_keys(items: Any = ()) -> Any:
    if type(items) not in (list, tuple) or not all(map(_is_plain_key, items)):
        raise ValueError("its members are not text or numbers")
    return items


def _encode(value: object, encoding: object = "latin1") -> bytes:
    # Python writes bytes like this in protocols that have no bytes.
    if type(value) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError("the text does not represent bytes")
    return value.encode("latin-1")


def _bytes(value: object = b"", encoding: object = "latin1") -> bytes:
    return value if type(value) is bytes else _encode(value, encoding)


def _byte_array(value: object = b"", encoding: object = "latin1") -> bytearray:
    return bytearray(value if type(value) is bytearray else _bytes(value, encoding))


_REBUILDS: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_with_dtype,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_parameter": _same_tensor,
    "torch._utils._rebuild_parameter_with_state": _same_tensor,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_sparse_csr_tensor": _sparse,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _device_tensor,
    "torch._utils._rebuild_device_tensor_from_numpy": _device_array,
    "torch._utils._rebuild_xla_tensor": _device_array,
}
_FUNCTIONS: dict[str, Callable[..., object]] = {
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.nn.parameter.Parameter": _same_tensor,
    "torch.nn.parameter.Buffer": _same_tensor,
    "torch.autograd.variable.Variable": _same_tensor,
    "torch.Size": lambda size=(): torch.Size(_sizes(size)),
    "torch.device": _with_plain(torch.device),
    "torch.serialization._get_layout": _with_plain(torch.serialization._get_layout),
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": lambda factory=None, *items: _mapping(*items),
    "builtins.dict": _mapping,
    "builtins.set": lambda *items: set(_plain_keys(*items)),
    "builtins.frozenset": lambda *items: frozenset(_plain_keys(*items)),
    "builtins.complex": _with_plain(complex),
    "builtins.bytes": _bytes,
    "builtins.bytearray": _byte_array,
    "_codecs.encode": _encode,
}
