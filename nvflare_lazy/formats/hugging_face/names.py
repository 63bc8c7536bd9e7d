# SPDX-License-Identifier: Apache-2.0
"""`rename_like`: the tensors of a federated result under the names of a Hugging Face directory.

NVFlare's client for Hugging Face and model wrappers put a prefix before the names, or strip one. The prefix is found by
comparing names, so that none has to be configured, and a result that does not match is an error.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import ModelDirectoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from nvflare_lazy.tensors.entry import TensorEntry

_MAX_EXAMPLES = 3
#: The prefix of the names of an adapter, before the path of a module.
ADAPTER_PREFIX = "base_model.model."
_ADAPTER_PART = re.compile(
    r"\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.(?!weight$|bias$)[^.]+)?"
    r"(?P<end>\.weight|\.bias)?$"
)
_SAVED_MODULE = re.compile(r"\.modules_to_save\.[^.]+\.")
# These are saved by PEFT without the name of their parameter.
_BARE_PARTS = ("lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


def rename_like(
    entries: Mapping[str, TensorEntry], names: Collection[str], where: str
) -> tuple[dict[str, TensorEntry], dict[str, TensorEntry]]:
    """Return the tensors under the names of a model, and the remaining tensors under their own names.

    Args:
        entries: The tensors.
        names: The names of the model.
        where: The path of the model, for messages.

    Raises:
        ModelDirectoryError: No name matches, or two tensors would have one name.
    """
    rename = renaming(entries, names, where)
    found: dict[str, TensorEntry] = {}
    others: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        target = next((known for known in (rename(name), name) if known in names), None)
        if target is None:
            others[name] = entry
        elif target in found:
            raise ModelDirectoryError(f"two tensors of the result are {quoted(target)} in {where}; remove one of them")
        else:
            found[target] = entry
    return found, others


def renaming(entries: Collection[str], names: Collection[str], where: str) -> Callable[[str], str]:
    """Return a function that adds or strips a prefix, so that most names of a result become names of a model.

    Raises:
        ModelDirectoryError: No name matches.
    """
    matches: Counter[tuple[str, str]] = Counter()
    by_end: dict[str, list[str]] = {}
    for name in names:
        for end in _ends(name):
            by_end.setdefault(end, []).append(name)
    for name in entries:
        for target in by_end.get(name, ()):
            matches["", target[: len(target) - len(name)]] += 1
        for end in _ends(name):
            if end != name and end in names:
                matches[name[: len(name) - len(end)], ""] += 1
    if not matches:
        raise ModelDirectoryError(
            f"no tensor of the result is one of {where}: the result has {examples(entries)}; "
            f"{where} has {examples(names)}"
        )
    # With equally many matches, the shorter change.
    stripped, added = max(matches, key=lambda change: (matches[change], -len(change[0]) - len(change[1])))
    return lambda name: added + name[len(stripped) :] if name.startswith(stripped) else name


def adapter_tensors(
    entries: Mapping[str, TensorEntry],
) -> tuple[dict[str, TensorEntry], dict[str, TensorEntry]]:
    """Return the tensors of an adapter under the names with which PEFT saves them, and the tensors of its base model.

    A trainer may send all parameters of a PEFT model, under the names that they have in the model.

    Raises:
        ModelDirectoryError: No tensor belongs to an adapter, or two would have one name.
    """
    saved = {name: adapter_name(name) for name in entries}
    is_whole_model = any(target not in (None, name) for name, target in saved.items())
    found: dict[str, TensorEntry] = {}
    base: dict[str, TensorEntry] = {}
    for name, target in saved.items():
        if target is None and is_whole_model:
            base[name] = entries[name]
        elif (target or name) in found:
            raise ModelDirectoryError(f"the result has {quoted(target)} of more than one adapter; keep one of them")
        else:
            found[target or name] = entries[name]
    if not any(saved.values()):
        raise ModelDirectoryError(f"the result has no tensor of a LoRA adapter; it has {examples(entries)}")
    return found, base


def without_wrapper(entries: Mapping[str, TensorEntry], where: str) -> dict[str, TensorEntry]:
    """Return the tensors of an adapter with PEFT's prefix first in their names, without the prefix of a wrapper.

    Raises:
        ModelDirectoryError: A name does not have PEFT's prefix.
    """
    found = {}
    for name, entry in entries.items():
        begin = name.find(ADAPTER_PREFIX)
        if begin < 0:
            raise ModelDirectoryError(
                f"{quoted(name)} of the result has no {ADAPTER_PREFIX!r}, and {where} has no weights to compare names "
                f"with; pass a directory that has them"
            )
        found[name[begin:]] = entry
    return found


def adapter_name(name: str) -> str | None:
    """Return the name with which PEFT saves a parameter, or None if it is not one of an adapter."""
    match = _ADAPTER_PART.search(name)
    if match is not None:
        end = "" if match["part"] in _BARE_PARTS else match["end"] or ".weight"
        return f"{name[: match.start()]}.{match['part']}{end}"
    saved = _SAVED_MODULE.search(name)
    if saved is not None:
        return f"{name[: saved.start()]}.{name[saved.end() :]}"
    return None


def examples(names: Iterable[str]) -> str:
    """Return a few names for a message."""
    listed = list(names)
    shown = ", ".join(quoted(name) for name in listed[:_MAX_EXAMPLES])
    return f"{shown} and {len(listed) - _MAX_EXAMPLES} more" if len(listed) > _MAX_EXAMPLES else shown or "none"


def _ends(name: str) -> list[str]:
    """Return a name and what remains of it after each of its dots."""
    return [name, *(name[match.end() :] for match in re.finditer(r"\.", name))]
