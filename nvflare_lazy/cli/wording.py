# SPDX-License-Identifier: Apache-2.0
"""How sizes, shapes, names and errors are written for a person to read.

What a file says about itself is never trusted with the terminal: a tensor's name may hold escape sequences.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Return `text` with everything a terminal would obey, or cannot show, written as an escape."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii") for char in text
    )


def error_line(error: Exception) -> str:
    """Return what an error has to say in one line."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return printable(f"{error.filename}: {error.strerror}")
    return " ".join(printable(line) for line in str(error).splitlines()) or type(error).__name__
