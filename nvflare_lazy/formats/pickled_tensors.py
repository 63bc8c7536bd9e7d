# SPDX-License-Identifier: Apache-2.0
"""What the pickle of a checkpoint is turned into: plain records, which say of a tensor where it lies and no more.

The unpickler makes these instead of torch's objects, so that nothing a file says is ever carried out; the tree of
them becomes names and entries afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


# No size in a file is beyond this; and below it an integer is its own hash, so that no file can choose many that
# collide.
_LARGEST_INTEGER = 1 << 60


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle may mention; calling it builds a record.

    Attributes:
        name: The dotted name, as Python would import it.
        build: Makes the record from the arguments in the pickle; ValueError or TypeError if they are wrong.
        is_class: Whether the pickle may also ask for `__new__`.
    """

    name: str
    build: Callable[..., object]
    is_class: bool = False


@dataclass(frozen=True, slots=True)
class StorageType:
    """A storage class, which stands for the dtype of the elements."""

    name: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage, or a part of one, by its key.

    Attributes:
        key: The storage's key in the file.
        dtype: What its elements are, `torch.uint8` for untyped storages.
        offset: First byte.
        nbytes: Bytes from there on.
        total: Bytes that the whole storage is said to have.
    """

    key: str
    dtype: torch.dtype
    offset: int
    nbytes: int
    total: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A strided tensor over a storage; its numbers are integers, and may be nonsense."""

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


@dataclass(slots=True)
class AttributeBag:
    """An object of which only the attributes count, such as `argparse.Namespace`."""

    attributes: dict[object, object] = field(default_factory=dict)

    def set_state(self, state: object) -> None:
        """Take the attributes."""
        if type(state) is not dict:
            raise ValueError("its attributes are not a dict")
        self.attributes.update(state)


def is_plain_key(key: object) -> bool:
    """Whether a dict or set may hold `key`: hashing it is quick, and no file can choose many that collide."""
    return type(key) in (str, bytes, bool, float, type(None), torch.dtype) or is_small(key)


def integers(values: object, what: str) -> tuple[int, ...]:
    """Return a tuple or list of integers as a tuple, or raise ValueError."""
    if not isinstance(values, (tuple, list)) or not all(map(is_small, values)):
        raise ValueError(f"the {what} is not a tuple of integers")
    return tuple(values)


def integer(value: object, what: str) -> int:
    """Return `value` if it is an integer, or raise ValueError."""
    if type(value) is not int or not is_small(value):
        raise ValueError(f"the {what} is not an integer, or too large")
    return value


def is_small(value: object) -> bool:
    """Whether `value` is an integer that no size exceeds."""
    return type(value) is int and -_LARGEST_INTEGER < value < _LARGEST_INTEGER


def storage_ref(storage_type: object, key: object, numel: object, view: object = None) -> StorageRef:
    """Make the record of a storage from a persistent id.

    Args:
        storage_type: The class of the storage.
        key: Its key in the file, text or (Python 2) bytes.
        numel: Elements of the whole storage.
        view: None, or (key of the view, first element, number of elements) in files of old.
    """
    if type(storage_type) is not StorageType:
        raise ValueError("its type is not a storage class")
    key = text(key, "key")
    width = storage_type.dtype.itemsize
    total = integer(numel, "number of elements") * width
    offset, nbytes = 0, total
    if view is not None:
        if type(view) is not tuple or len(view) != 3:
            raise ValueError("it is a view of something that is not described")
        offset = integer(view[1], "offset of the view") * width
        nbytes = integer(view[2], "size of the view") * width
    if min(total, offset, nbytes) < 0 or offset + nbytes > total:
        raise ValueError(f"bytes {offset} to {offset + nbytes} are not inside of its {total} bytes")
    return StorageRef(key, storage_type.dtype, offset, nbytes, total)


def text(value: object, what: str) -> str:
    """Return text that Python 2 may have written as bytes."""
    if type(value) is bytes:
        return value.decode("ascii", "backslashreplace")
    if type(value) is not str:
        raise ValueError(f"the {what} is not text")
    return value
