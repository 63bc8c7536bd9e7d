# SPDX-License-Identifier: Apache-2.0
"""Text for users: sizes such as "256MiB", "1.5 GB" or "5%", and untrusted text made safe for messages and logs.

Names and error texts come from the network and from files. Errors and log lines escape text that a terminal or a reader
of a log could misinterpret.
"""

from __future__ import annotations

import logging
import re
import reprlib
import traceback
from collections.abc import Mapping
from math import isfinite
from typing import Any, TypeVar

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*")

_Class = TypeVar("_Class")
_MAX_QUOTED = 120
_MAX_MESSAGE = 2000
_MAX_LOG_MESSAGE = 20_000
# Precedes each further line of a log message, so that none can be taken for a log line.
_MARK = "  | "


class _Quote(reprlib.Repr):
    """Quotes values of any size in little time and memory, whatever their own `__repr__` does."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _MAX_QUOTED

    def repr_int(self, value: int, level: int) -> str:
        # Python does not write integers of thousands of digits.
        return super().repr_int(value, level) if value.bit_length() < 1000 else f"<int of {value.bit_length()} bits>"

    def repr_bytes(self, value: bytes, level: int) -> str:
        return self.repr_instance(value[:_MAX_QUOTED], level)


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


def printable(text: str) -> str:
    """Return text with escapes for control characters, line breaks, bidirectional marks and other invisible ones."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii") for char in text
    )


def quoted(text: object) -> str:
    """Return untrusted text, or any other value, as a message shows it: quoted, and cut if it is very long."""
    return printable(_Quote().repr(text))


def message(text: str) -> str:
    """Return the text of an error: printable, and cut if it is very long."""
    return printable(_cut(text, _MAX_MESSAGE))


def get_logger(name: str) -> logging.Logger:
    """Return a logger whose messages are printable; further lines of a message are marked, even in tracebacks."""
    logger = logging.getLogger(name)
    # Repeated calls have no effect.
    logger.addFilter(_make_printable)
    return logger


def logs_printably(component: type[_Class]) -> type[_Class]:
    """Class decorator: make the logger printable that NVFlare gives to the objects of a class."""
    get_logger(f"{component.__module__}.{component.__qualname__}")
    return component


def _make_printable(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if not text.isprintable() or len(text) > _MAX_LOG_MESSAGE:
        record.msg, record.args = _lines(text), ()
    if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
        record.exc_text = _MARK + _lines("".join(traceback.format_exception(record.exc_info[1])))
    return True


def _lines(text: str) -> str:
    return f"\n{_MARK}".join(map(printable, _cut(text, _MAX_LOG_MESSAGE).splitlines()))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}... ({len(text) - length} more characters)"


def to_json(value: object) -> Any:
    """Return a value as strict JSON can hold it: tuples become lists, and what JSON cannot hold becomes text."""
    if isinstance(value, (str, int, type(None))) or (isinstance(value, float) and isfinite(value)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    return quoted(value)
