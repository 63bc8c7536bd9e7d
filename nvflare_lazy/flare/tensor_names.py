# SPDX-License-Identifier: Apache-2.0
"""`TensorNames`: the names that clients use for the tensors of a job that started from a Hugging Face directory.

On the server, each tensor has the one name under which it is stored. Tensors are renamed when a task is sent and when a
result is accepted, so aggregation and checkpoints do not depend on tied tensors, prefixes or versions of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nvflare_lazy.formats.hugging_face.names import adapter_name

_MAX_PREFIXES = 16


@dataclass(frozen=True)
class TensorNames:
    """The names that the models of clients have for tensors, in addition to the stored names or instead of them.

    Attributes:
        further: The stored name for each name that is not one.
        unused: Stored names that clients do not have.
        is_adapter: Whether the model is a PEFT adapter, whose tensors have longer names in a model.
        exclude: Tensors whose names match are not part of the job.
    """

    further: Mapping[str, str] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    is_adapter: bool = False
    exclude: re.Pattern[str] | None = None

    def of_clients(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return weights under all names that clients have; these are the same objects, which are sent once."""
        further = {name: weights[stored] for name, stored in self.further.items() if stored in weights}
        return {**further, **{name: value for name, value in weights.items() if name not in self.unused}}

    def stored(self, names: Collection[str], model: Collection[str]) -> dict[str, str | None]:
        """Return the stored names for those of a result that are not stored names, or None for a tensor to be dropped.

        If a result has a tensor under its stored name and under others, the stored name counts. A prefix is added or
        stripped only if one and the same change makes names of the model of all names.

        Args:
            names: The names of a result.
            model: The names of the global model.
        """
        changed: dict[str, str | None] = {}
        if self.exclude is not None:
            changed = dict.fromkeys(filter(self.exclude.search, names))
            names = [name for name in names if name not in changed]
        known = {**{name: stored for name, stored in self.further.items() if stored in model}, **dict.fromkeys(model)}
        saved = self._saved_names(names, known)
        changed.update(dict.fromkeys(name for name in names if name not in saved))
        targets = {name: name for name in saved.values() if name in known}
        unknown = next((name for name in saved.values() if name not in known), None)
        if unknown is not None:
            found = [
                renamed for change in _changes(unknown, known) if (renamed := _all(saved.values(), known, *change))
            ]
            if len(found) == 1:
                [targets] = found
        targets = {name: targets[each] for name, each in saved.items() if each in targets}
        taken = {target for target in targets.values() if known[target] is None}
        for name, target in targets.items():
            stored = known[target]
            if stored is not None and stored in taken:
                changed[name] = None
            elif stored is not None or target != name:
                changed[name] = stored or target
                taken.add(stored or target)
        return changed

    def _saved_names(self, names: Collection[str], known: Collection[str]) -> dict[str, str]:
        """Return the names with which PEFT saves the tensors of an adapter, without those of its base model."""
        if not self.is_adapter:
            return {name: name for name in names}
        saved = {name: None if name in known else adapter_name(name) for name in names}
        targets = {name: target or name for name, target in saved.items()}
        if len(set(targets.values())) < len(targets):
            # Of more than one adapter; the error has these names.
            return {name: name for name in names}
        adapter = {name: target for name, target in targets.items() if target in known or saved[name]}
        # A client may send all parameters of a model with an adapter: those of the base model are frozen.
        return adapter if len(adapter) >= len(known) else targets


def renamed(values: Mapping[str, Any], names: Mapping[str, str | None]) -> dict[str, Any]:
    """Return values under new names. A value with None as its new name is dropped."""
    targets = ((names.get(name, name), value) for name, value in values.items())
    return {name: value for name, value in targets if name is not None}


def _changes(name: str, known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the prefixes to strip or to add that make this name a known one."""
    for match in list(re.finditer(r"\.", name))[:_MAX_PREFIXES]:
        if name[match.end() :] in known:
            yield name[: match.end()], ""
    ends = (other for other in known if other.endswith(f".{name}"))
    for other, _ in zip(ends, range(_MAX_PREFIXES), strict=False):
        yield "", other.removesuffix(name)


def _all(names: Collection[str], known: Collection[str], stripped: str, added: str) -> dict[str, str] | None:
    """Return a known name for each name. Return None if a name has no known name, or two have the same."""
    targets = {}
    for name in names:
        change = added + name.removeprefix(stripped)
        target = change if name.startswith(stripped) and change in known else name
        if target not in known:
            return None
        targets[name] = target
    return targets if len(set(targets.values())) == len(targets) else None
