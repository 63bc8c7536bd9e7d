# SPDX-License-Identifier: Apache-2.0
"""The fenced code blocks of a Markdown document, with the comment above each that sets how it is tested."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,}|~{3,})\s*(?P<language>[\w+-]*)")
_COMMENT = re.compile(r"<!--\s*(?P<key>not run|file):\s*(?P<value>.*?)\s*-->")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        path: The document.
        line: Number of the block's first line in it, counted from 1.
        language: The word after the fence.
        text: The lines between the fences.
        not_run: The reason of a `<!-- not run: reason -->` above the block.
        file: The name of a `<!-- file: name -->` above the block.
    """

    path: Path
    line: int
    language: str
    text: str
    not_run: str | None = None
    file: str | None = None

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a document in order."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found, at, above = [], 0, ""
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if not fence:
            above = lines[at] if lines[at].strip() else above
            at += 1
            continue
        start = at + 1
        at = next((i for i in range(start, len(lines)) if _closes(lines[i], fence["fence"])), None)
        if at is None:
            raise ValueError(f"{path}:{start}: this code block has no end")
        comment = _COMMENT.fullmatch(above.strip())
        notes = {comment["key"].replace(" ", "_"): comment["value"]} if comment else {}
        text = textwrap.dedent("\n".join(lines[start:at])) + "\n"
        found.append(Block(path, start + 1, fence["language"], text, **notes))
        above = ""
        at += 1
    return found


def _closes(line: str, fence: str) -> bool:
    return set(line.strip()) == {fence[0]} and len(line.strip()) >= len(fence)
