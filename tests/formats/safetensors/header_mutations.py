# SPDX-License-Identifier: Apache-2.0
"""Initial safetensors messages, and ways to break them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any


def message(header: object, data: bytes = b"") -> bytes:
    """Return a safetensors message with exactly this header (JSON, text or bytes), valid or not."""
    if isinstance(header, str):
        header = header.encode()
    elif not isinstance(header, bytes):
        header = json.dumps(header).encode()
    return len(header).to_bytes(8, "little") + header + data


def entry(dtype: str = "U8", shape: Any = (0,), offsets: Any = (0, 0)) -> dict[str, Any]:
    """Return one tensor of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def good_headers() -> list[tuple[dict[str, Any], int]]:
    """Return headers that keep every rule, each with the length of its data."""
    names = ("F64", "F32", "BF16", "I16", "F8_E4M3", "BOOL", "C64", "U64")
    widths = (64, 32, 16, 16, 8, 8, 64, 64)
    many, offset = {}, 0
    for index, (name, width) in enumerate(zip(names, widths, strict=True)):
        nbytes = 6 * width // 8
        many[f"layer.{index}.weight"] = entry(name, [2, 3], [offset, offset + nbytes])
        offset += nbytes
    return [
        ({"w": entry("F32", [2], [0, 8]), "b": entry("U8", [3], [8, 11])}, 11),
        ({"__metadata__": {"format": "pt", "ä\n": "\u20ac\U0001f600"}, "a": entry("F16", [], [0, 2])}, 2),
        ({"b": entry("I8", [2], [2, 4]), "a": entry("I8", [2], [0, 2]), "z": entry("F32", [0, 4], [2, 2])}, 4),
        ({"packed": entry("F4", [2, 4], [0, 4]), "odd": entry("F6_E2M3", [4], [4, 7])}, 7),
        ({}, 0),
        ({"__metadata__": {}}, 0),
        (many, offset),
    ]


# Pieces that sit on the edges of the rules.
_TOKENS = [
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b'"',
        b"\\",
        b" ",
        b"\n",
        b"\t",
        b"\x00",
        b"\xff",
        b"\xed\xa0\x80",
        b"\xc3\xa4",
    ),
    *(b"0", b"-0", b"-1", b"1.0", b"1e1", b"0x1", b"01", b"+1", b"NaN", b"Infinity", b"null", b"true", b"[]", b"{}"),
    *(b"4294967296", b"9223372036854775807", b"9223372036854775808", b"18446744073709551615", b"18446744073709551616"),
    *(b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__"', b'"F32"', b'"F6_E3M2"', b'"F31"', b'"\\ud800"'),
    *(b'"\\u0041"', b"\\u0000", b"1" * 30, b"[" * 200, b"/*x*/", b",,", b'"a":', b'"extra":1,', b"\xef\xbb\xbf"),
]
_VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 8, 2**31, 2**63, 2**64, 0.0, 1.5, 1e300, "", "F32", "a", [], {}, [0], [[]]),
    *([0, 0], [0, 8], [8, 0], [2, 3], [1] * 64, [1] * 65, [2**62, 4, 0], [0, 2**62, 4], ["1"], {"F32": None}),
]


def mutated_texts(seed: int, count: int) -> Iterator[tuple[bytes, int]]:
    """Yield texts of headers, most of them broken, each with the length of the data that goes with it."""
    chance = random.Random(seed)
    bases = good_headers()
    for _ in range(count):
        header, nbytes = chance.choice(bases)
        separators = chance.choice([(",", ":"), (", ", ": ")])
        if chance.random() < 0.5:
            header, as_ascii = _with_other_values(header, chance), chance.random() < 0.5
            text = json.dumps(header, ensure_ascii=as_ascii, separators=separators).encode()
        else:
            text = json.dumps(header, separators=separators).encode()
        for _ in range(chance.choice([0, 1, 1, 2, 4])):
            text = chance.choice(_MUTATIONS)(text, chance)
        if chance.random() < 0.1:
            nbytes += chance.choice([-1, 1])
        yield text, max(nbytes, 0)


def _with_other_values(header: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    changed = json.loads(json.dumps(header))
    for _ in range(chance.choice([1, 1, 2])):
        place = changed
        while isinstance(place, (dict, list)) and place:
            key = chance.choice(list(place)) if isinstance(place, dict) else chance.randrange(len(place))
            if chance.random() < 0.35 or not isinstance(place[key], (dict, list)) or not place[key]:
                _change(place, key, chance)
                break
            place = place[key]
    return changed


def _change(place: Any, key: Any, chance: random.Random) -> None:
    action = chance.randrange(5)
    if action == 0:
        del place[key]
    elif action == 1 and isinstance(place, dict):
        place[chance.choice(["a", "dtype", "shape", "data_offsets", "__metadata__", "x", ""])] = copy.deepcopy(
            place[key]
        )
    elif action == 2 and isinstance(place, list):
        place.insert(key, copy.deepcopy(chance.choice(_VALUES)))
    elif action == 3 and type(place[key]) is int:
        place[key] += chance.choice([-2, -1, 1, 2, 8])
    else:
        place[key] = copy.deepcopy(chance.choice(_VALUES))


def _flip(text: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(text) + 1)
    return text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :]


def _insert(text: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(text) + 1)
    return text[:at] + chance.choice(_TOKENS) + text[at:]


def _delete(text: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(text) + 1)
    return text[:at] + text[at + chance.choice([1, 1, 2, 5, 20]) :]


def _repeat(text: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(text) + 1)
    end = at + chance.choice([1, 2, 5, 20, 50])
    return text[:end] + text[at:end] + text[end:]


def _replace_number(text: bytes, chance: random.Random) -> bytes:
    places = [at for at, byte in enumerate(text) if chr(byte).isdigit()]
    if not places:
        return text
    at = chance.choice(places)
    return text[:at] + chance.choice(_TOKENS) + text[at + 1 :]


def _repeat_member(text: bytes, chance: random.Random) -> bytes:
    at = text.find(b":{")
    start = text.rfind(b'"', 0, text.rfind(b'"', 0, at)) if at > 0 else -1
    end = text.find(b"}", at)
    if start < 0 or end < 0:
        return text
    return text[: end + 1] + b"," + text[start : end + 1] + text[end + 1 :]


def _pad(text: bytes, chance: random.Random) -> bytes:
    space = chance.choice([b" ", b"   ", b"\n", b" \t", b"\x00", b"\r\n"])
    return chance.choice([text + space, space + text])


_MUTATIONS: list[Callable[[bytes, random.Random], bytes]] = [
    _flip,
    _insert,
    _delete,
    _repeat,
    _replace_number,
    _repeat_member,
    _pad,
]
