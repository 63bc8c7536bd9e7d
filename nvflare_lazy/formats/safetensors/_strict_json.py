# SPDX-License-Identifier: Apache-2.0
"""A parser for untrusted JSON that reads member by member and builds only the values that the caller requests.

A general parser builds every value, and a header of empty lists takes twenty times its size. The headers and indexes of
checkpoints have a known structure, so the caller requests values in that order and the text has to match.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import SafetensorsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

# Each name costs about 500 bytes once it is read, however short it is in the file. The largest mixtures of experts have
# 200,000 tensors, in all their files.
MAX_MEMBERS = 500_000
# Longest text of a flat object: 64 dimensions of 20 digits and generous white space.
_MAX_FLAT_TEXT_LEN = 16_384

# As almost all strings are: plain ASCII without escapes.
_PLAIN_STRING = re.compile(r'"([ !#-\[\]-~]*)"')
_TOKEN = re.compile(r"[ \t\n\r]*(.?)", re.DOTALL)
_FLAT_OBJECT = re.compile(rf"[ \t\n\r]*(\{{[^{{}}]{{0,{_MAX_FLAT_TEXT_LEN}}}\}})")
_NESTING_OR_STRING = re.compile(r'["\[\]{}]')
_LITERAL_END = re.compile(r"[^,}\]]*")
_SPACES_TO_THE_END = re.compile(r" *\Z")
# A skipped value is scanned character by character, which takes a second for ten megabytes.
_MAX_SKIPPED_TEXT_LEN = 1 << 20


class JsonCursor:
    """A position in a JSON text in UTF-8, which moves behind each value that is taken."""

    def __init__(self, text: Buffer, where: str) -> None:
        # One byte a character, whatever the text: all that JSON itself is made of is ASCII, and the strings are
        # decoded one by one.
        self._text = str(text, "latin-1")
        self._where = where
        self.position = 0

    def members(self) -> Iterator[str]:
        """Enter an object and yield its keys; the caller takes each value before asking for the next key."""
        self._take("{")
        if self._peek() == "}":
            self._take("}")
            return
        seen: set[str] = set()
        while True:
            key = self.string()
            if key in seen:
                raise SafetensorsError("duplicate-key", f"{self._where}: duplicate key {quoted(key)}")
            if len(seen) == MAX_MEMBERS:
                raise SafetensorsError(
                    "too-many-tensors", f"{self._where}: more than {MAX_MEMBERS} names in one JSON object"
                )
            seen.add(key)
            self._take(":")
            yield key
            if self._take(",}") == "}":
                return

    def string(self) -> str:
        """Take a string."""
        plain = self.take(_PLAIN_STRING)
        if plain is not None:
            return plain[1]
        self._take('"')
        start = self.position - 1
        try:
            value, self.position = _DECODER.raw_decode(self._text, start)
            raw = self._text[start : self.position]
            if not raw.isascii():
                value, _ = _DECODER.raw_decode(raw.encode("latin-1").decode("utf-8"))
            if not value.isascii():
                value.encode("utf-8")
        except UnicodeError as error:
            raise SafetensorsError(
                "header-encoding", f"{self._where}: a string at byte {start} is not UTF-8 ({error})"
            ) from None
        except ValueError as error:
            raise self.fault(f"{error}") from None
        return str(value)

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Take a match at this position, or nothing. The caller guarantees that a match is complete JSON."""
        match = pattern.match(self._text, self.position)
        if match is not None:
            self.position = match.end()
        return match

    def flat_object(self) -> dict[str, Any] | None:
        """Take an object without nested objects. Return None if another value follows, or a very long object."""
        match = _FLAT_OBJECT.match(self._text, self.position)
        if match is None:
            return None
        try:
            value, _ = _DECODER.raw_decode(match[1])  # ends where the text does, at its only brace
        except RecursionError:
            raise self.fault("lists nested too deep") from None
        except KeyError as error:  # of `_without_duplicates`
            raise SafetensorsError(
                "duplicate-key", f"{self._where}: duplicate key {quoted(error.args[0])} in one entry"
            ) from None
        except ValueError as error:
            raise self.fault(f"{error}") from None
        self.position = match.end()
        assert isinstance(value, dict)
        return value

    def skip(self) -> None:
        """Skip any value without building it; its inside is not checked."""
        if self._peek() not in ("[", "{", '"'):
            self.position = self._end_of(_LITERAL_END)
            return
        depth = 0
        most = self.position + _MAX_SKIPPED_TEXT_LEN
        while True:
            match = _NESTING_OR_STRING.search(self._text, self.position, most)
            if match is None:
                raise self.fault("a value that does not end, or not within a megabyte")
            self.position = match.start()
            if match[0] == '"':
                self.string()
            else:
                self.position += 1
                depth += 1 if match[0] in "[{" else -1
            if depth <= 0:
                return

    def only_spaces_follow(self) -> bool:
        """Whether nothing but spaces comes after this place."""
        return _SPACES_TO_THE_END.match(self._text, self.position) is not None

    def is_at(self, character: str) -> bool:
        """Whether the next value starts with `character`."""
        return self._peek() == character

    def fault(self, what: str) -> SafetensorsError:
        """Return the error for text that is not valid at this position."""
        return SafetensorsError("header-json", f"{self._where}: invalid JSON at byte {self.position}: {what}")

    def _peek(self) -> str:
        match = _TOKEN.match(self._text, self.position)
        return match[1] if match else ""

    def _take(self, expected: str) -> str:
        found = self._text[self.position : self.position + 1]
        if found and found in expected:  # as in most files: no white space
            self.position += 1
            return found
        match = _TOKEN.match(self._text, self.position)
        found = match[1] if match else ""
        if not found or found not in expected:
            wanted = " or ".join(map(repr, expected))
            raise self.fault(f"expected {wanted}, found {found!r}" if found else f"expected {wanted}, found the end")
        assert match is not None
        self.position = match.end()
        return found

    def _end_of(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self._text, self.position)
        return match.end() if match else self.position


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise KeyError(key)
        made[key] = value
    return made


def _number(digits: str) -> int | float:
    if digits == "-0":
        return -0.0
    # Python refuses to parse very long numbers with a different error; this number is too large for any field.
    return int(digits) if len(digits) <= 20 else 1 << 64


_DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_int=_number)
