# SPDX-License-Identifier: Apache-2.0
"""Converts the unpickled contents of a checkpoint to named tensors with entries, and to extras.

Tensors that share a storage in the file share its source, and tied tensors (same storage, same geometry) become one
entry.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import PyTorchCheckpointError, SectionError, UnsupportedDtypeError, UnsupportedTensorError
from nvflare_lazy.formats.pytorch._pickle import OpaqueObject, StorageRef, TensorView, UnsupportedTensor, refuse
from nvflare_lazy.tensors import dtypes
from nvflare_lazy.tensors.byte_source import FailedSource
from nvflare_lazy.tensors.converted_sources import ByteSwappedSource, ConjugatedSource
from nvflare_lazy.tensors.entry import TensorEntry
from nvflare_lazy.tensors.strided_source import is_contiguous
from nvflare_lazy.tensors.tensor_memory import extent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nvflare_lazy.formats.pytorch.data_source import LazyDataSource
    from nvflare_lazy.tensors.byte_source import ByteSource

# A tensor that stands alone has no name in the file.
_ONLY_TENSOR_NAME = "tensor"
_ONLY_VALUE_KEY = "value"
_MAX_DEPTH = 64
# Bytes that an item takes while its container is taken apart, bytes of an item of the whole checkpoint with its name,
# and bytes of a tensor with its name in several dictionaries.
_ITEM_BYTES, _EXTRA_BYTES, _NAMED_BYTES = 48, 200, 320

TensorRecord = TensorView | StorageRef | UnsupportedTensor
_NOTHING = object()
_PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, bytes, bytearray, set, frozenset, torch.dtype, torch.Size),
)


class CheckpointTree:
    """The contents of a checkpoint, taken apart.

    Nested dicts, lists and attributes are joined by dots: `{"model": {"weight": t}, "epoch": 3}` has the tensor
    `model.weight` and the extra `{"epoch": 3}`.

    Args:
        path: The file, for messages.
        content: What its pickle described.
        spend: Counts the memory taken: a file may repeat parts of itself by reference, but not without end.

    Attributes:
        tensors: Their records by name, in the order of the file.
        extras: The rest of the checkpoint, as plain Python. Containers of nothing but tensors are omitted.
    """

    def __init__(self, path: str, content: object, spend: Callable[[int], None]) -> None:
        self._path = path
        self._spend = spend
        self._opaque: set[int] = set()
        self.tensors: dict[str, TensorRecord] = {}
        if isinstance(content, TensorRecord):
            content = {_ONLY_TENSOR_NAME: content}
        else:
            parts = children(content)
            content = {_ONLY_VALUE_KEY: content} if parts is None else dict(self._counted(parts))
        rest = self._take_apart(content, "", 0)
        self.extras: dict[str, object] = _by_text(rest) if rest is not _NOTHING else {}

    def _counted(self, parts: Iterable[tuple[object, object]]) -> Iterator[tuple[object, object]]:
        for part in parts:
            self._spend(_EXTRA_BYTES)
            yield part

    def _take_apart(self, container: object, prefix: str, depth: int) -> Any:
        """Collect the tensors of a container; return what else is in it, or `_NOTHING`."""
        if depth > _MAX_DEPTH:
            raise PyTorchCheckpointError(
                f"{self._path}: the checkpoint is nested too deeply, or contains itself; save the state dict alone"
            )
        keys: list[object] = []
        rest: list[object] = []
        for key, part in children(container) or ():
            self._spend(_ITEM_BYTES)
            left: object = _NOTHING
            if type(part) in _PLAIN:
                left = part
            elif isinstance(part, TensorRecord):
                self._add(self._name(prefix, key), part)
            elif children(part) is None:
                self._check_opaque(part)
                left = part if type(part) is OpaqueObject else getattr(part, "__name__", str(part))
            else:
                left = self._take_apart(part, f"{self._name(prefix, key)}.", depth + 1)
            keys.append(key)
            rest.append(left)
        if rest and all(part is _NOTHING for part in rest):
            return _NOTHING
        if isinstance(container, (dict, OpaqueObject)):
            return {key: part for key, part in zip(keys, rest, strict=True) if part is not _NOTHING}
        # The places of tensors in a list are kept, so that the others keep theirs.
        items = [None if part is _NOTHING else part for part in rest]
        return tuple(items) if type(container) is tuple else items

    def _check_opaque(self, value: object) -> None:
        """Refuse an object of a foreign class that has tensors: they would be lost."""
        if type(value) is not OpaqueObject:
            return
        parts: list[object] = [value]
        while parts:
            part = parts.pop()
            if isinstance(part, TensorRecord):
                refuse(self._path, value.name)
            if id(part) in self._opaque:
                continue
            if type(part) is OpaqueObject:
                inner = [*part.arguments, *part.states]
            else:
                inner = [item for _, item in children(part) or ()]
            self._spend(_ITEM_BYTES * len(inner))
            if inner:
                self._opaque.add(id(part))
                parts += inner

    def _name(self, prefix: str, key: object) -> str:
        name = prefix + _key_text(key)
        self._spend(len(name))
        return name

    def _add(self, name: str, record: TensorRecord) -> None:
        self._spend(_NAMED_BYTES)
        if name in self.tensors:
            raise PyTorchCheckpointError(
                f"{self._path}: two tensors would have the name {quoted(name)}; open the part you need with section=..."
            )
        self.tensors[name] = record


def select(path: str, content: object, section: str) -> object:
    """Return one section of a checkpoint.

    Args:
        path: The file, for messages.
        content: What its pickle described.
        section: A key, or several joined by dots.
    """
    found = _find(content, section, 0)
    if found is None or children(found) is None:
        known = [_key_text(key) for key, part in children(content) or () if children(part) is not None]
        raise SectionError(
            f"{path} has no section {quoted(section)} that holds named tensors; "
            + (f"it has {', '.join(map(quoted, known[:20]))}" if known else "it has no sections, open it without one")
        )
    return found


def children(value: object) -> Iterable[tuple[object, object]] | None:
    """Return the keys and parts of a container, or None for anything else."""
    if isinstance(value, dict):
        return value.items()
    if type(value) is OpaqueObject:
        attributes = value.attributes()
        return None if attributes is None else attributes.items()
    if type(value) in (list, tuple):
        return enumerate(value)  # type: ignore[arg-type]
    return None


def _find(content: object, section: str, depth: int) -> object:
    if depth > _MAX_DEPTH:
        return None
    by_text = {_key_text(key): part for key, part in children(content) or ()}
    if section in by_text:
        return by_text[section]
    for at in (index for index, letter in enumerate(section) if letter == "."):
        if section[:at] in by_text:
            found = _find(by_text[section[:at]], section[at + 1 :], depth + 1)
            if found is not None:
                return found
    return None


def _by_text(parts: dict[object, object]) -> dict[str, object]:
    """Return parts by the text of their keys; where the keys 1 and "1" would be the same, the former is "1 (int)"."""
    found: dict[str, object] = {}
    for key, part in parts.items():
        text = _key_text(key)
        if type(key) is not str and (text in parts or text in found):
            text = f"{text} ({type(key).__name__})"
        found[text] = part
    return found


def _key_text(key: object) -> str:
    return key.decode("utf-8", "backslashreplace") if type(key) is bytes else str(key)


# What torch itself can count: dimensions, and bytes of a tensor.
_MAX_DIMENSIONS = 64
_MAX_TENSOR_BYTES = (1 << 63) - 1


class EntryBuilder:
    """Makes the entries of one file.

    Args:
        data: The file's storages.
    """

    def __init__(self, data: LazyDataSource) -> None:
        self._data = data
        self._entries: dict[TensorView, TensorEntry] = {}
        self._sources: dict[tuple[StorageRef, int, tuple[bool, ...]], ByteSource] = {}

    def entry(self, name: str, record: TensorRecord) -> TensorEntry:
        """Return the entry of a tensor, the same one for the same record.

        Args:
            name: The tensor's name, for messages.
            record: The tensor or storage as it was unpickled.
        """
        if isinstance(record, UnsupportedTensor):
            # Each of them says its own name when it is used.
            return self._failed(name, record.kind, record.dtype, record.shape)
        if isinstance(record, StorageRef):
            record = TensorView(record, record.dtype, (record.nbytes // record.dtype.itemsize,), (1,), 0)
        made = self._entries.get(record)
        if made is None:
            made = self._entries[record] = self._make(name, record)
        return made

    def _make(self, name: str, record: TensorView) -> TensorEntry:
        self._check(name, record)
        try:
            element_type = dtypes.by_torch(record.dtype)
        except UnsupportedDtypeError:
            return self._failed(name, f"a tensor of {record.dtype}", record.dtype, record.shape)
        number = record.dtype.itemsize // 2 if record.dtype.is_complex else record.dtype.itemsize
        flipped = _flipped(record)
        if any(flipped) and not (record.dtype.is_complex or record.dtype.is_floating_point):
            return self._failed(name, f"a negated view of {record.dtype}", record.dtype, record.shape)
        source = self._source(record.storage, number, flipped)
        if is_contiguous(record.shape, record.strides):
            offset = record.offset if 0 not in record.shape else 0
            return TensorEntry(source, element_type, record.shape, None, offset)
        return TensorEntry(source, element_type, record.shape, record.strides, record.offset)

    def _failed(self, name: str, kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorEntry:
        self._check_shape(name, shape, dtype)
        try:
            element_type = dtypes.by_torch(dtype)
        except UnsupportedDtypeError:
            element_type = dtypes.by_torch(torch.uint8)
        error = UnsupportedTensorError(
            f"{quoted(name)} in {self._data.path} is {kind}, which cannot be read without loading it; "
            "load the checkpoint with torch.load and save it as an ordinary tensor"
        )
        return TensorEntry(
            FailedSource(prod(shape) * element_type.bits * element_type.packed // 8, error), element_type, shape
        )

    def _source(self, storage: StorageRef, width: int, flipped: tuple[bool, ...]) -> ByteSource:
        key = (storage, width if self._data.swapped else 1, flipped)
        found = self._sources.get(key)
        if found is not None:
            return found
        source = self._data.storage(storage.key).slice(storage.offset, storage.nbytes)
        if self._data.swapped and width > 1:
            source = ByteSwappedSource(source, width)
        if any(flipped):
            source = ConjugatedSource(source, width, flipped)
        self._sources[key] = source
        return source

    def _check(self, name: str, record: TensorView) -> None:
        self._check_shape(name, record.shape, record.dtype)
        if min((record.offset, *record.strides), default=0) < 0:
            raise self._impossible(name, "a negative stride or offset")
        end = (record.offset + extent(record.shape, record.strides)) * record.dtype.itemsize
        if 0 not in record.shape and end > record.storage.nbytes:
            raise self._impossible(name, f"elements up to byte {end} of a storage of {record.storage.nbytes} bytes")

    def _check_shape(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if len(shape) > _MAX_DIMENSIONS or min(shape, default=0) < 0:
            raise self._impossible(name, "a negative size, or too many dimensions")
        if prod(size for size in shape if size) * dtype.itemsize > _MAX_TENSOR_BYTES:
            raise self._impossible(name, "more bytes than can be counted")

    def _impossible(self, name: str, what: str) -> PyTorchCheckpointError:
        return PyTorchCheckpointError(f"{self._data.path}: {quoted(name)} has {what}; the file is damaged or forged")


def _flipped(record: TensorView) -> tuple[bool, ...]:
    """Which parts of each element have the other sign than in the storage."""
    if record.dtype.is_complex:
        return record.negated, record.negated != record.conjugated
    return (record.negated,)
