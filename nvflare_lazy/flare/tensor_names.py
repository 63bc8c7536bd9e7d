# SPDX-License-Identifier: Apache-2.0
"""`TensorNames`: the names that clients use for the tensors of a job that started from a Hugging Face directory.

On the server, each tensor has the one name under which it is stored. Names are added when a task is sent, and matched
when a result is accepted, so aggregation and checkpoints do not know of tied tensors or prefixes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_MAX_PREFIXES = 16


@dataclass(frozen=True)
class TensorNames:
    """The names of tied tensors, by which clients know a tensor besides the stored name.

    Attributes:
        tied: The stored name for each further name.
        exclude: Tensors whose names match are not part of the job.
    """

    tied: Mapping[str, str] = field(default_factory=dict)
    exclude: re.Pattern[str] | None = None

    def with_tied(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return weights under all names of their tensors; these are the same objects, which are sent once."""
        return {**{name: weights[stored] for name, stored in self.tied.items() if stored in weights}, **weights}

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
        known = {**{name: stored for name, stored in self.tied.items() if stored in model}, **dict.fromkeys(model)}
        targets = {name: name for name in names if name in known}
        unknown = next((name for name in names if name not in known), None)
        if unknown is not None:
            found = [renamed for change in _changes(unknown, known) if (renamed := _all(names, known, *change))]
            if len(found) == 1:
                [targets] = found
        taken = {target for target in targets.values() if known[target] is None}
        for name, target in targets.items():
            stored = known[target]
            if stored is not None and stored in taken:
                changed[name] = None
            elif stored is not None or target != name:
                changed[name] = stored or target
                taken.add(stored or target)
        return changed


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
