# SPDX-License-Identifier: Apache-2.0
"""Unpickles PyTorch checkpoints with torch's weights-only unpickler, using storages without data.

The only module that uses `torch._weights_only_unpickler`, which is private. Tensors come out as *meta tensors*: torch's
own functions rebuild their geometry, and the address of their storage identifies the bytes of the file. Names that
torch does not allow are never imported: objects of such classes become `OpaqueObject`s, or the file is refused.
"""

from __future__ import annotations

import io
import re
import sys
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import _weights_only_unpickler as weights_only
from torch.storage import TypedStorage, UntypedStorage

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import ForbiddenGlobalError, NVFlareLazyError, PyTorchCheckpointError
from nvflare_lazy.formats.pytorch._translator import Caller, Kind, Name, PickleTranslator, is_plain_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvflare_lazy.formats.pytorch._stream import PickleStream

# torch counts bytes in 63 bits.
_MAX_STORAGE_BYTES = 1 << 62


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


class MetaStorages:
    """The storages of a checkpoint without their data, by which tensors are traced back to the file."""

    def __init__(self) -> None:
        self._made: dict[StorageRef, UntypedStorage] = {}
        self._refs: dict[int, StorageRef] = {}

    def storage(self, ref: StorageRef) -> TypedStorage:
        """Return the typed storage for `ref`; all of them share one untyped storage."""
        made = self._made.get(ref)
        if made is None:
            made = self._made[ref] = UntypedStorage(ref.nbytes, device="meta")  # type: ignore[no-untyped-call]
            self._refs[made._cdata] = ref
        return TypedStorage(wrap_storage=made, dtype=ref.dtype, _internal=True)  # type: ignore[no-untyped-call]

    def ref(self, value: torch.Tensor | TypedStorage) -> StorageRef | None:
        """Return the storage of a tensor, or None if its storage is not in the file."""
        untyped = value.untyped_storage() if isinstance(value, torch.Tensor) else value._untyped_storage
        return self._refs.get(untyped._cdata)


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


def unpickle(stream: PickleStream, load_id: Callable[[object], object]) -> object:
    """Return the contents of the next pickle of a stream.

    Args:
        stream: The stream.
        load_id: Returns the storage or tensor for a persistent id, or raises ValueError.
    """
    translator = PickleTranslator(stream, partial(_find_name, stream.path), _extend, _build, frozenset, load_id)
    unpickler = _Unpickler(io.BytesIO(translator.translate()))
    unpickler.values = translator.values
    unpickler.load_id = load_id
    del translator  # with all that it took
    try:
        return unpickler.load()  # type: ignore[no-untyped-call]
    except (NVFlareLazyError, MemoryError):
        raise
    except Exception as error:  # of any kind: torch passes values of the file to its own functions
        raise PyTorchCheckpointError(
            f"{stream.path}: the pickle makes no sense ({str(error)[:200]}): the file is damaged or forged"
        ) from None


class _Unpickler(weights_only.Unpickler):
    """torch's unpickler, with the calls of the translator as persistent ids."""

    values: list[object]
    load_id: Callable[[object], object]

    def persistent_load(self, pid: tuple[Any, ...]) -> object:
        if len(pid) == 2:
            return self.values[pid[1]]
        if len(pid) == 3:
            return _call(pid[1], pid[2])
        return self.load_id(pid)


def _call(called: Any, arguments: tuple[object, ...]) -> object:
    if type(called) is OpaqueObject:
        return OpaqueObject(called.name, arguments)
    return _calls().get(called, called)(*arguments)


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


def _find_name(path: str, dotted: str) -> Name:
    found = _names().get(dotted)
    if found is None and dotted.startswith("torch."):
        # Storages and tensors of devices and of old versions have the names of today's, in other modules.
        plain = dotted.rpartition(".")[2].removeprefix("_")
        found = _names().get(f"torch.{plain}") if plain.endswith(("Storage", "Tensor")) else None
        if found is not None:
            return Name(found.value, False, None)
    if found is not None:
        return found
    if _DATA.fullmatch(dotted) or dotted.partition(".")[0] not in _FIRST_PARTY:
        return Name(OpaqueObject(dotted), False, "ours")
    refuse(path, dotted)


def refuse(path: str, dotted: str) -> NoReturn:
    """Raise the error for a name that a checkpoint may not use."""
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


@cache
def _names() -> dict[str, Name]:
    allowed = weights_only._get_allowed_globals()
    names = {dotted: Name(value, True, None) for dotted, value in allowed.items()}
    for dotted in _CALLED_BY_TORCH:
        names[dotted] = Name(allowed[dotted], True, "torch")
    for dotted, function in _FUNCTIONS.items():
        makes: Kind = "bytes" if function in (_bytes, _encode) else "object"
        names[dotted] = Name(allowed.get(dotted, function), dotted in allowed, "ours", makes)
    for dotted, function in _MAPPINGS.items():
        calls: Caller = "ours with arguments" if dotted in allowed else "ours"
        names[dotted] = Name(allowed.get(dotted, function), dotted in allowed, calls, "dict")
    names["builtins.set"] = Name(set, True, "ours with arguments", "set")
    return names


@cache
def _calls() -> dict[object, Callable[..., object]]:
    """Return the functions below by the values that torch has for their names."""
    functions = {**_FUNCTIONS, **_MAPPINGS, "builtins.set": _set}
    return {_names()[dotted].value: function for dotted, function in functions.items()}


# ---- functions that replace torch's and Python's ---------------------------------------------------------------


def _build(target: object, state: object) -> object:
    if type(target) is OpaqueObject:
        target.states.append(state)
    elif isinstance(target, (torch.Tensor, UnsupportedTensor)):
        # A parameter's gradient flag and hooks, or attributes; four or five items would be another tensor.
        if type(state) is tuple and len(state) > 3:
            raise ValueError("a tensor that is replaced by its own state")
    elif not isinstance(
        target, dict
    ):  # for dicts: attributes of an OrderedDict, such as the `_metadata` of a state dict
        raise ValueError(f"a state for a {type(target).__name__}")
    return target


def _extend(target: object, items: tuple[object, ...]) -> object:
    if type(target) is OpaqueObject:
        target.states.append(items)
    elif type(target) is set:
        target.update(items)
    else:
        raise ValueError(f"items for a {type(target).__name__}")
    return target


def _same_tensor(data: object, *_: object) -> object:
    """Return the tensor that a parameter or variable wraps; its gradient flag and hooks are not needed."""
    if not isinstance(data, (torch.Tensor, UnsupportedTensor)):
        raise ValueError("its data is not a tensor")
    return data


def _device_tensor(data: Any, dtype: object, *_: object) -> object:
    """Return the copy on the CPU that tensors of XLA and other devices are saved as."""
    _same_tensor(data)
    return (
        data if data.dtype is dtype else UnsupportedTensor("a tensor of another device", data.dtype, tuple(data.shape))
    )


def _device_array(data: Any, dtype: torch.dtype, *_: object) -> UnsupportedTensor:
    return UnsupportedTensor("a tensor of another device, saved as a NumPy array", dtype, _sizes(data.states[0][1]))


def _from_type(function: object, tensor_type: object, arguments: object, state: object) -> object:
    """Rebuild a tensor that has attributes, which are not needed."""
    if function not in _rebuilds() or type(tensor_type) is OpaqueObject or type(arguments) is not tuple:
        raise ValueError("a tensor of a class or function that is not torch's")
    return _call(function, arguments)


@cache
def _rebuilds() -> frozenset[object]:
    return frozenset(
        name.value for dotted, name in _names().items() if dotted.startswith("torch._utils._rebuild_") and name.calls
    )


def _quantized(storage: TypedStorage, offset: object, size: object, *_: object) -> UnsupportedTensor:
    dtype = torch.int32 if storage.dtype is torch.qint32 else torch.uint8
    return UnsupportedTensor("a quantized tensor", dtype, _sizes(size))


def _sparse(layout: object, data: Any) -> UnsupportedTensor:
    values, size = (data[1], data[2]) if layout is torch.sparse_coo else (data[2], data[3])
    return UnsupportedTensor("a sparse tensor", values.dtype, _sizes(size))


def _nested(buffer: torch.Tensor, *_: object) -> UnsupportedTensor:
    return UnsupportedTensor("a nested tensor", buffer.dtype, tuple(buffer.shape))


def _sizes(size: Any) -> tuple[int, ...]:
    if type(size) not in (tuple, list, torch.Size) or len(size) > 64 or not all(type(part) is int for part in size):
        raise ValueError("the size is not a tuple of integers")
    return tuple(size)


def _mapping(items: object = None, *_: object) -> dict[object, object]:
    if items is None:
        return {}
    if isinstance(items, dict):
        return dict(items)
    if type(items) is not list or not all(type(item) in (list, tuple) and len(item) == 2 for item in items):
        raise ValueError("its items are not pairs")
    _check_keys([key for key, _ in items])
    return dict(items)


def _default_mapping(factory: object = None, *items: object) -> dict[object, object]:
    return _mapping(*items)


def _check_keys(items: object) -> list[object]:
    if not isinstance(items, (list, tuple)) or not all(map(is_plain_key, items)):
        raise ValueError("its members are not text or numbers")
    return list(items)


def _set(items: object = ()) -> set[object]:
    return set(_check_keys(items))


def _frozen_set(items: object = ()) -> frozenset[object]:
    return frozenset(_check_keys(items))


def _encode(value: object, encoding: object = "latin1") -> bytes:
    # Python writes bytes like this in protocols that have no bytes.
    if type(value) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError("the text does not represent bytes")
    return value.encode("latin-1")


def _bytes(value: object = b"", encoding: object = "latin1") -> bytes:
    return value if type(value) is bytes else _encode(value, encoding)


def _byte_array(value: object = b"", encoding: object = "latin1") -> bytearray:
    return bytearray(value if type(value) is bytearray else _bytes(value, encoding))


_CALLED_BY_TORCH = (
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_meta_tensor_no_storage",
    "torch.Size",
    "torch.device",
    "torch.serialization._get_layout",
)
_FUNCTIONS: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_parameter": _same_tensor,
    "torch._utils._rebuild_parameter_with_state": _same_tensor,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_sparse_csr_tensor": _sparse,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _device_tensor,
    "torch._utils._rebuild_device_tensor_from_numpy": _device_array,
    "torch._utils._rebuild_xla_tensor": _device_array,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.nn.parameter.Parameter": _same_tensor,
    "torch.nn.parameter.Buffer": _same_tensor,
    "torch.autograd.variable.Variable": _same_tensor,
    "_codecs.encode": _encode,
    "builtins.frozenset": _frozen_set,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _byte_array,
    "builtins.complex": complex,
}
_MAPPINGS: dict[str, Callable[..., object]] = {
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": _default_mapping,
    "builtins.dict": _mapping,
}
