# SPDX-License-Identifier: Apache-2.0
"""How sizes, shapes, names and errors are written for a person to read.

What a file says about itself is never trusted with the terminal: a tensor's name may hold escape sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence


def printable(text: str) -> str:
    """Return `text` with everything a terminal would obey, or cannot show, written as an escape."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii") for char in text
    )


def error_line(error: Exception) -> str:
    """Return what an error has to say in one line."""
    text = " ".join(str(error).splitlines())
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return printable(text) or type(error).__name__


def count(number: int, thing: str) -> str:
    """Return for example "1 tensor" or "1,234 tensors"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> Iterator[str]:
    """Yield the lines of a table.

    A plain one, with two spaces between its columns and as wide as it has to be: it starts at once, however many rows
    there are, and can be searched, cut and copied.

    Args:
        rows: The cells.
        right: Numbers of the columns that are set against their right edge.
    """
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = []
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            padding = " " * (width - cell_len(cell))
            cells.append(padding + cell if index in right else cell + padding)
        yield "  ".join(cells).rstrip()
