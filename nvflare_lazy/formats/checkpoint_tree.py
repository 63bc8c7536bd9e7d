# SPDX-License-Identifier: Apache-2.0
"""From the nested contents of a checkpoint to tensors by name, and what is left when they are taken out.

Between the unpickler, which gives a tree of records, and the entries of a `LazyTensorDict`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.storage import TypedStorage

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import PyTorchCheckpointError, SectionError
from nvflare_lazy.formats.unpickler import OpaqueObject, UnsupportedTensor, refuse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nvflare_lazy.formats.pickle_stream import AllocationLimit

# A tensor that stands alone has no name in the file.
_NAME_OF_THE_ONLY_TENSOR = "tensor"
_KEY_OF_THE_ONLY_VALUE = "value"
_DEEPEST = 64
# Bytes that an item takes while its container is taken apart.
_ITEM_BYTES = 48

TensorRecord = torch.Tensor | TypedStorage | UnsupportedTensor
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
        limit: The limit of the pickle: a file may repeat parts of itself by reference, but not without end.

    Attributes:
        tensors: Their records by name, in the order of the file.
        extras: Whatever else is in the checkpoint, as plain Python; what held nothing but tensors is not there.
    """

    def __init__(self, path: str, content: object, limit: AllocationLimit) -> None:
        self._path = path
        self._spend = limit.spend
        self._opaque: set[int] = set()
        self.tensors: dict[str, TensorRecord] = {}
        if isinstance(content, TensorRecord):
            content = {_NAME_OF_THE_ONLY_TENSOR: content}
        else:
            parts = children(content)
            content = {_KEY_OF_THE_ONLY_VALUE: content} if parts is None else dict(parts)
        rest = self._take_apart(content, "", 0)
        self.extras: dict[str, object] = _by_text(rest) if rest is not _NOTHING else {}

    def _take_apart(self, container: object, prefix: str, depth: int) -> Any:
        """Collect the tensors of a container; return what else is in it, or `_NOTHING`."""
        if depth > _DEEPEST:
            raise PyTorchCheckpointError(
                f"{self._path}: the checkpoint holds itself, or parts of itself without end; save the state dict alone"
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
                left = part if type(part) is OpaqueObject else str(part)
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
        if name in self.tensors:
            raise PyTorchCheckpointError(
                f"{self._path}: two tensors would both be called {quoted(name)}; "
                "open the part you need with section=..."
            )
        self.tensors[name] = record


def select(path: str, content: object, section: str) -> object:
    """Return the part of a checkpoint that is called `section`.

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
    if depth > _DEEPEST:
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
