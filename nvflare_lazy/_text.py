# SPDX-License-Identifier: Apache-2.0
"""Text for users: sizes such as "256MiB", "1.5 GB" or "5%", and untrusted text quoted in messages."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from math import isfinite
from typing import Any

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*")

_quote = reprlib.Repr()
_quote.maxstring = _quote.maxother = 120


def parse_size(size: int | str, *, of: int | None = None) -> int:
    """Return a size in bytes.

    Args:
        size: Bytes, or a string such as "256MiB", "2 GB" or, where `of` is given, "5%".
        of: The size that a percentage refers to.

    Example:
        >>> parse_size("1.5KiB")
        1536
    """
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"invalid size {size}: must be >= 0")
        return size
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(f"invalid size {size!r}: expected a number of bytes, or a string such as '256MiB'")
    number, unit = match.groups()
    if unit == "%":
        if of is None or float(number) > 100:
            raise ValueError(f"invalid size {size!r}: expected a number of bytes, or a string such as '256MiB'")
        return int(float(number) * of / 100)
    if unit.upper() not in _UNITS:
        raise ValueError(
            f"invalid size {size!r}: unknown unit {unit!r}; available: B, KiB, MiB, GiB, TiB, PiB, KB, MB, GB, TB, PB"
        )
    return int(float(number) * _UNITS[unit.upper()]) if "." in number else int(number) * _UNITS[unit.upper()]


def format_size(nbytes: int) -> str:
    """Return a size as text, for example "1.5 GiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} PiB"


def quoted(text: object) -> str:
    """Return untrusted text as a message shows it: quoted, and cut if it is very long."""
    return _quote.repr(text)


def to_json(value: object) -> Any:
    """Return a value as strict JSON can hold it: tuples become lists, and what JSON cannot hold becomes text."""
    if isinstance(value, (str, int, type(None))) or (isinstance(value, float) and isfinite(value)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    return quoted(value)
