# SPDX-License-Identifier: Apache-2.0
"""Makes the records of a long job shorter: removes what later records repeat, then details of old rounds.

The writer calls it when the file exceeds its limit, so the size is bounded for any number of rounds and clients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from nvflare_lazy.records.schema import CLIENT_FIELDS, KINDS

_Lines = list[dict[str, Any]]
_DETAILS = frozenset({"transfer", "task", "contribution"})
_TOTALS = frozenset({"round", "job", "end"})


def thin(content: bytes, max_bytes: int) -> bytes:
    """Return the lines of a file with at most `max_bytes`, without lines that are not records.

    Args:
        content: The file.
        max_bytes: The size of the result.
    """
    lines = [line for line in map(_parse, content.splitlines()) if line is not None]
    for step in _steps():
        encoded = [json.dumps(line).encode() for line in lines]
        if sum(map(len, encoded)) + len(encoded) <= max_bytes:
            break
        lines = step(lines)
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _steps() -> Iterator[Callable[[_Lines], _Lines]]:
    yield _drop_repeated
    # Each step halves the remaining lines of its kind, and twenty halves of a file are nothing.
    for turn in range(26):
        yield _halve_samples
        yield _shorten_rounds
        yield lambda lines: _halve(lines, _DETAILS)
        if turn >= 6:
            yield lambda lines: _halve(lines, _TOTALS)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("kind") in KINDS else None


def _drop_repeated(lines: _Lines) -> _Lines:
    """Drop contributions whose round has a record, which contains them."""
    kept: _Lines = []
    ended = False
    for line in reversed(lines):
        kind = line.get("kind")
        if kind in ("round", "job"):
            ended = True
        if kind != "contribution" or not ended:
            kept.append(line)
    return kept[::-1]


def _halve_samples(lines: _Lines) -> _Lines:
    """Keep the larger one of each two samples of a process."""
    kept: _Lines = []
    first: dict[object, int] = {}
    for line in lines:
        if line.get("kind") != "sample":
            kept.append(line)
            continue
        process = str(line.get("process"))
        place = first.pop(process, None)
        if place is None:
            first[process] = len(kept)
            kept.append(line)
        elif _memory(line) > _memory(kept[place]):
            kept[place] = line
    return kept


def _memory(line: dict[str, Any]) -> float:
    memory = line.get("memory_bytes")
    return memory if isinstance(memory, (int, float)) else 0


def _shorten_rounds(lines: _Lines) -> _Lines:
    """Drop the clients of the older half of the rounds that list any."""
    long = [line for line in lines if line.get("kind") == "round" and any(name in line for name in CLIENT_FIELDS)]
    older = {id(line) for line in long[: len(long) // 2]}
    return [
        {name: part for name, part in line.items() if name not in CLIENT_FIELDS} if id(line) in older else line
        for line in lines
    ]


def _halve(lines: _Lines, kinds: frozenset[str]) -> _Lines:
    """Drop every second line of some kinds among the older half of them; the first and the last one stay."""
    of_kinds = [place for place, line in enumerate(lines) if line.get("kind") in kinds]
    dropped = set(of_kinds[1 : max(2, len(of_kinds) // 2) : 2]) - set(of_kinds[-1:])
    return [line for place, line in enumerate(lines) if place not in dropped]
