# SPDX-License-Identifier: Apache-2.0
"""Edits the text of a job's configuration, JSON or HOCON: what does not change keeps its comments and format.

HOCON has more syntax than a configuration needs. Values that this module does not interpret, such as substitutions,
stay as they are; a construct that it cannot edit safely is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from nvflare_lazy.errors import JobAdaptationError

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None}
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_KEY_CHARACTERS = re.compile(r"[^\s{}\[\],:=+#\"$]+")
_COMMENT = re.compile(r"(#|//)[^\n]*")
_SPACE = re.compile(r"[^\S\n]*")
# The end of a value without quotes.
_TERMINATOR = re.compile(r"[\n,}\]#]|//")


@dataclass(frozen=True)
class Uninterpreted:
    """A value that is not interpreted, by its text, such as `${name}`."""

    text: str


@dataclass
class _Node:
    """A value and its position in the text."""

    start: int
    end: int
    data: Any


@dataclass
class _Item:
    """An element of an array, or a member of an object, with its key as a path: `a.b = 1` has two parts."""

    start: int
    node: _Node
    key: tuple[str, ...] = ()
    #: Text of the key and of the separator after it.
    label: str = ""


@dataclass
class _Container(_Node):
    items: list[_Item] = field(default_factory=list)
    #: Positions of the first and the last character between the brackets.
    inside: tuple[int, int] = (0, 0)
    is_object: bool = True


@dataclass
class _Piece:
    """An item of the new text: comments and space before it, its text, and the rest of its line."""

    before: str
    text: str
    has_comma: bool
    after: str
    key: tuple[str, ...] = ()


_MISSING = object()


class ConfigText:
    """The text of a configuration, as data and with a method that writes other data into it.

    Args:
        text: The text.
        strict_json: Whether the format is JSON rather than HOCON.
    """

    def __init__(self, text: str, *, strict_json: bool) -> None:
        self._text = text
        self._strict_json = strict_json
        self._position = 0
        found = re.search(r"^([ \t]+)\S", text, re.MULTILINE)
        self._step = found[1] if found else "  "
        self._root = self._parse_root()
        # HOCON may be written like JSON, with keys in quotes.
        self._like_json = strict_json or any(item.label.startswith('"') for item in self._root.items)

    @property
    def data(self) -> dict[str, Any]:
        """The configuration; values that are not interpreted are `Uninterpreted`."""
        data: dict[str, Any] = self._root.data
        return data

    def with_data(self, data: dict[str, Any]) -> str:
        """Return the text with other data."""
        return self._text[: self._root.start] + self._written(self._root, data) + self._text[self._root.end :]

    # ---- reading -----------------------------------------------------------------------------------------------------

    def _parse_root(self) -> _Container:
        self._skip_space()
        if self._peek() == "{":
            root = self._parse_container()
            self._skip_space()
            if self._position < len(self._text):
                raise self._error("text after the end of the configuration")
            return root
        return self._parse_items(0, len(self._text), is_object=True, closing="")

    def _parse_container(self) -> _Container:
        start = self._position
        is_object = self._peek() == "{"
        self._position += 1
        return self._parse_items(start, start + 1, is_object=is_object, closing="}" if is_object else "]")

    def _parse_items(self, start: int, first: int, *, is_object: bool, closing: str) -> _Container:
        if not closing:
            start = first = 0
        items: list[_Item] = []
        while True:
            self._skip_space(commas=bool(items))
            if self._position >= len(self._text):
                if closing:
                    raise self._error(f"missing {closing}")
                break
            if self._peek() == closing:
                break
            items.append(self._parse_member() if is_object else _Item(self._position, self._parse_value()))
        inside = (first, self._position)
        self._position += len(closing)
        data = _object_data(items, self._error) if is_object else [item.node.data for item in items]
        return _Container(start, self._position, data, items, inside, is_object)

    def _parse_member(self) -> _Item:
        start = self._position
        key = []
        while True:
            if self._peek() == '"':
                key.append(self._parse_string())
            else:
                found = _KEY_CHARACTERS.match(self._text, self._position)
                if not found:
                    raise self._error("expected a key")
                self._position = found.end()
                key.extend(part for part in found[0].split(".") if part)
            if self._peek() not in (".", '"') and self._text[self._position - 1] != ".":
                break
            if self._peek() == ".":
                self._position += 1
        self._skip_space()
        if self._text.startswith("+=", self._position):
            raise self._error("+= is not supported")
        if self._peek() in (":", "="):
            self._position += 1
            self._skip_space()
        elif self._peek() != "{":
            raise self._error(f"expected a value after {'.'.join(key)!r}")
        label = self._text[start : self._position]
        return _Item(start, self._parse_value(), tuple(key), label)

    def _parse_value(self) -> _Node:
        start = self._position
        node = self._parse_single_value()
        rest = _SPACE.match(self._text, self._position)
        assert rest is not None
        ends = rest.end() >= len(self._text) or _TERMINATOR.match(self._text, rest.end())
        if ends:
            return node
        # Several values in one line are one value in HOCON.
        while not ends:
            if self._peek() in ("{", "["):
                self._parse_container()
            elif self._peek() == '"':
                self._parse_string()
            elif self._peek() == "$" and (end := self._text.find("}", self._position)) != -1:
                self._position = end + 1
            else:
                self._position += 1
            ends = self._position >= len(self._text) or _TERMINATOR.match(self._text, self._position)
        self._position = start + len(self._text[start : self._position].rstrip())
        return _Node(start, self._position, Uninterpreted(self._text[start : self._position]))

    def _parse_single_value(self) -> _Node:
        start = self._position
        if self._peek() in ("{", "["):
            return self._parse_container()
        if self._peek() == '"':
            value = self._parse_string()
            return _Node(start, self._position, value)
        if self._peek() == "$":
            end = self._text.find("}", start)
            self._position = len(self._text) if end == -1 else end + 1
            return _Node(start, self._position, Uninterpreted(self._text[start : self._position]))
        found = _TERMINATOR.search(self._text, start)
        text = self._text[start : found.start() if found else len(self._text)].rstrip()
        if not text:
            raise self._error("expected a value")
        if "$" in text or '"' in text:
            self._position = start
            return _Node(start, start, Uninterpreted(""))
        self._position = start + len(text)
        return _Node(start, self._position, _unquoted(text))

    def _parse_string(self) -> str:
        start = self._position
        if self._text.startswith('"""', start):
            end = self._text.find('"""', start + 3)
            if end == -1:
                raise self._error('missing """')
            self._position = end + 3
            return self._text[start + 3 : end]
        try:
            value, end = json.decoder.scanstring(self._text, start + 1)  # type: ignore[attr-defined]
        except ValueError:
            raise self._error("invalid string") from None
        self._position = end
        return str(value)

    def _skip_space(self, *, commas: bool = False) -> None:
        while self._position < len(self._text):
            comment = _COMMENT.match(self._text, self._position)
            if comment:
                self._position = comment.end()
            elif self._peek().isspace() or (commas and self._peek() == ","):
                self._position += 1
            else:
                return

    def _peek(self) -> str:
        return self._text[self._position : self._position + 1]

    def _error(self, problem: str) -> JobAdaptationError:
        line = self._text.count("\n", 0, self._position) + 1
        return JobAdaptationError(f"line {line}: {problem}")

    # ---- writing -----------------------------------------------------------------------------------------------------

    def _written(self, node: _Node, new: Any, *, inline: bool = False) -> str:
        """Return the text of a value with new data, and keep as much of the old text as possible."""
        if node.data == new and type(node.data) is type(new):
            return self._text[node.start : node.end]
        if isinstance(node, _Container) and isinstance(new, dict if node.is_object else list):
            return self._rebuilt(node, new, inline=inline)
        return self._rendered(new, self._indentation(node.start), inline=inline)

    def _rebuilt(self, node: _Container, new: Any, *, inline: bool) -> str:
        pieces, closing = self._pieces(node)
        broken = any("\n" in piece.before for piece in pieces) or (not pieces and not inline)
        if node.is_object:
            kept, added = self._members(node, new, pieces, broken=broken)
        else:
            kept, added = self._elements(node, new, pieces, broken=broken)
        had_trailing_comma = bool(pieces) and pieces[-1].has_comma
        for piece in added:
            piece.before = "\n" + self._inner_indentation(node, broken=broken) if broken else " "
            same = [index for index, other in enumerate(kept) if piece.key[1:] and other.key[:1] == piece.key[:1]]
            kept.insert(same[-1] + 1 if same else len(kept), piece)
        if not pieces and broken:
            closing = "\n" + self._indentation(node.start)
        if kept and kept[0] in added and not broken:
            kept[0].before = ""
        commas = self._strict_json or any(piece.has_comma for piece in pieces) or not broken
        for piece, following in pairwise(kept):
            piece.has_comma = piece.has_comma or commas or "\n" not in following.before
        if kept:
            kept[-1].has_comma = had_trailing_comma
        text = "".join(piece.before + piece.text + ("," if piece.has_comma else "") + piece.after for piece in kept)
        opening, end = self._text[node.start : node.inside[0]], self._text[node.inside[1] : node.end]
        return opening + text + (closing if kept else "") + end

    def _pieces(self, node: _Container) -> tuple[list[_Piece], str]:
        """Split the text between the brackets into items, and the space before the closing bracket."""
        pieces = []
        position = node.inside[0]
        before = ""
        for index, item in enumerate(node.items):
            before += self._text[position : item.start]
            following = node.items[index + 1].start if index + 1 < len(node.items) else node.inside[1]
            gap = self._text[item.node.end : following]
            line = re.match(r"[^\S\n]*(,?)([^\S\n]*(?:(?:#|//)[^\n]*)?(?=\n|$))?", gap)
            assert line is not None
            after = (line[2] or "") if line[1] else line[0]
            if line[1] or after.strip():
                rest = gap[line.end() :]
            else:
                after, rest = "", gap
            pieces.append(_Piece(before, self._text[item.start : item.node.end], bool(line[1]), after, item.key))
            before, position = rest, following
        return pieces, before

    def _members(
        self, node: _Container, new: dict[str, Any], pieces: list[_Piece], *, broken: bool
    ) -> tuple[list[_Piece], list[_Piece]]:
        kept = []
        covered: dict[str, Any] = {}
        for item, piece in zip(node.items, pieces, strict=True):
            value: Any = new
            for part in item.key:
                value = value.get(part, _MISSING) if isinstance(value, dict) else _MISSING
            if value is _MISSING:
                continue
            inside: dict[str, Any] = covered
            for part in item.key[:-1]:
                inside = inside.setdefault(part, {})
            inside[item.key[-1]] = None
            inline = "\n" not in piece.before and bool(node.start)
            piece.text = item.label + self._written(item.node, value, inline=inline)
            kept.append(piece)
        added = []
        label = next((item.label for item in node.items), "")
        indentation = self._inner_indentation(node, broken=broken)
        for path, value in _missing(new, covered):
            text = self._label(path, like=label) + self._rendered(value, indentation, inline=not broken)
            added.append(_Piece("", text, False, "", path))
        return kept, added

    def _elements(
        self, node: _Container, new: list[Any], pieces: list[_Piece], *, broken: bool
    ) -> tuple[list[_Piece], list[_Piece]]:
        by_identity = {_identity(item.node.data, index): index for index, item in enumerate(node.items)}
        kept, added = [], []
        inline = bool(pieces) and "\n" not in pieces[-1].text
        indentation = self._inner_indentation(node, broken=broken)
        for index, value in enumerate(new):
            found = by_identity.get(_identity(value, index))
            if found is None:
                added.append(_Piece("", self._rendered(value, indentation, inline=inline or not broken), False, ""))
                continue
            piece = pieces[found]
            piece.text = self._written(node.items[found].node, value, inline="\n" not in piece.text)
            kept.append(piece)
        return kept, added

    def _rendered(self, value: Any, indentation: str, *, inline: bool) -> str:
        if isinstance(value, Uninterpreted):
            return value.text
        if isinstance(value, dict | list) and value:
            inner = "" if inline else "\n" + indentation + self._step
            label = '"' if self._like_json else ""
            items = (
                [(self._label((name,), like=label), item) for name, item in value.items()]
                if isinstance(value, dict)
                else [("", item) for item in value]
            )
            parts = [name + self._rendered(item, indentation + self._step, inline=inline) for name, item in items]
            opening, closing = "{}" if isinstance(value, dict) else "[]"
            separator = ", " if inline else "," + inner if self._like_json else inner
            return opening + inner + separator.join(parts) + ("" if inline else "\n" + indentation) + closing
        return json.dumps(value, ensure_ascii=False)

    def _label(self, path: tuple[str, ...], *, like: str) -> str:
        """Return a key with its separator, in the style of another key."""
        if self._strict_json or like.startswith('"') or (not like and self._like_json):
            return ".".join(json.dumps(part, ensure_ascii=False) for part in path) + ": "
        parts = (part if _PLAIN_KEY.fullmatch(part) else json.dumps(part, ensure_ascii=False) for part in path)
        return ".".join(parts) + (": " if like.rstrip().endswith(":") else " = ")

    def _inner_indentation(self, node: _Container, *, broken: bool) -> str:
        """Return the indentation of the items of a container, or the one that they would have."""
        if node.items and broken:
            return self._indentation(node.items[-1].start)
        has_brackets = node.inside[0] > node.start
        return self._indentation(node.start) + (self._step if has_brackets else "")

    def _indentation(self, position: int) -> str:
        """Return the space at the start of the line of a position."""
        line = self._text[self._text.rfind("\n", 0, position) + 1 : position]
        return line[: len(line) - len(line.lstrip())]


def _object_data(items: list[_Item], error: Callable[[str], JobAdaptationError]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for item in items:
        inside = data
        for part in item.key[:-1]:
            inside = inside.setdefault(part, {})
            if not isinstance(inside, dict):
                raise error(f"{'.'.join(item.key)!r} is set twice; keep one")
        if not item.key or item.key[-1] in inside or item.key[0] == "include":
            problem = "include is not supported" if item.key[:1] == ("include",) else "is set twice; keep one"
            raise error(f"{'.'.join(item.key)!r} {problem}")
        # A copy: two members never share what a caller may change.
        inside[item.key[-1]] = deepcopy(item.node.data)
    return data


def _missing(new: dict[str, Any], covered: dict[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """Return the paths and values of new data that no member has."""
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, value in new.items():
        if name not in covered:
            found.append(((name,), value))
        elif isinstance(covered[name], dict) and isinstance(value, dict):
            found += [((name, *path), inner) for path, inner in _missing(value, covered[name])]
    return found


def _identity(element: Any, index: int) -> Any:
    """Return what tells an element of an array from the others: its id, or its place."""
    name = element.get("id") if isinstance(element, dict) else None
    return name if isinstance(name, str) else index


def _unquoted(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        return json.loads(text)
    return text
