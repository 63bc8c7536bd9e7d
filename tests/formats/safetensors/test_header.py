# SPDX-License-Identifier: Apache-2.0
"""The rules of the safetensors header, one by one, and what attackers make of them."""

from __future__ import annotations

import json
import pickle
import time
import tracemalloc
from contextlib import contextmanager
from typing import TYPE_CHECKING, get_args

import pytest
from safetensors import SafetensorError, deserialize

from nvflare_lazy.errors import FormatError, SafetensorsError, SafetensorsRule, SaveError
from nvflare_lazy.formats.safetensors import _strict_json
from nvflare_lazy.formats.safetensors.header import (
    GrowingHeader,
    encode_header,
    header_length,
    parse_header,
    parse_message,
    read_header,
)
from nvflare_lazy.formats.safetensors.reader import open_safetensors
from nvflare_lazy.tensors.tensor_file import TensorFile
from tests.formats.safetensors.header_mutations import entry, good_headers, message

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def rule_broken(rule: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[SafetensorsError]]:
    """Expect an error that names this rule."""
    with pytest.raises(SafetensorsError, match=match) as caught:
        yield caught
    assert caught.value.rule == rule


def one(**changes: object) -> bytes:
    """Return a message with one tensor of one byte, its entry changed."""
    return message({"a": {**entry("U8", [1], [0, 1]), **changes}}, b"\0")


def rewritten(old: bytes, new: bytes) -> bytes:
    """Return the same message with the text of its header changed."""
    return message(one()[8:-1].replace(old, new), b"\0")


# fmt: off
BROKEN: dict[str, tuple[str, bytes]] = {
    "empty": ("header-truncated", b""),
    "no length": ("header-truncated", b"\x02\0\0\0\0\0\0"),
    "header cut short": ("header-truncated", message("{}")[:-1]),
    "header over 100 MB": ("header-too-large", (100_000_001).to_bytes(8, "little") + b"{}"),
    "header of 16 EiB": ("header-too-large", b"\xff" * 8 + b"{}"),
    "no header": ("header-start", message("")),
    "a list": ("header-start", message("[]")),
    "byte order mark": ("header-start", message("\ufeff{}")),
    "not UTF-8 in a name": ("header-encoding", message(b'{"\xff":1}')),
    "surrogate in UTF-8": ("header-encoding", message(b'{"\xed\xa0\x80":1}')),
    "half a surrogate pair": ("header-encoding", message(r'{"\ud800":1}')),
    "no quotes": ("header-json", message("{a:1}")),
    "ends early": ("header-json", message('{"a"')),
    "unknown escape": ("header-json", message(r'{"\x41":1}')),
    "line break in a name": ("header-json", message('{"a\n":1}')),
    "trailing comma": ("header-json", message('{"__metadata__":{},}')),
    "leading zero": ("header-json", rewritten(b"[1]", b"[01]")),
    "NUL behind it": ("header-padding", message("{}\0")),
    "two objects": ("header-padding", message("{}{}")),
    "tensor twice": ("duplicate-key", message('{"a":%s,"a":%s}' % ((json.dumps(entry()),) * 2))),
    "name twice, spelled differently": (
        "duplicate-key", message('{"a":%s,"\\u0061":%s}' % ((json.dumps(entry()),) * 2))),
    "metadata key twice": ("duplicate-key", message('{"__metadata__":{"a":"1","a":"1"}}')),
    "metadata twice": ("duplicate-key", message('{"__metadata__":{},"__metadata__":{}}')),
    "field twice": ("duplicate-key", rewritten(b'"shape"', b'"shape":[1],"shape"')),
    "metadata is a list": ("invalid-metadata", message('{"__metadata__":[]}')),
    "metadata holds a number": ("invalid-metadata", message('{"__metadata__":{"a":1}}')),
    "metadata holds an object": ("invalid-metadata", message('{"__metadata__":{"a":{}}}')),
    "entry is a number": ("invalid-entry", message('{"a":1}')),
    "entry is null": ("invalid-entry", message('{"a":null}')),
    "entry without dtype": ("invalid-entry", message('{"a":{"shape":[0],"data_offsets":[0,0]}}')),
    "unknown dtype": ("unknown-dtype", one(dtype="U9")),
    "dtype in small letters": ("unknown-dtype", one(dtype="u8")),
    "dtype is null": ("unknown-dtype", one(dtype=None)),
    "shape is a number": ("invalid-shape", one(shape=1)),
    "negative size": ("invalid-shape", one(shape=[-1])),
    "minus zero": ("invalid-shape", rewritten(b"[1]", b"[-0]")),
    "size with a fraction": ("invalid-shape", one(shape=[1.0])),
    "size with an exponent": ("invalid-shape", rewritten(b"[1]", b"[1e0]")),
    "size is true": ("invalid-shape", one(shape=[True])),
    "size is text": ("invalid-shape", one(shape=["1"])),
    "size is NaN": ("invalid-shape", one(shape=[float("nan")])),
    "size of 64 bits": ("size-overflow", one(shape=[2**64])),
    "size of 5000 digits": ("size-overflow", rewritten(b"[1]", b"[" + b"9" * 5000 + b"]")),
    "product overflows to zero": ("size-overflow", one(shape=[2**32, 2**32])),
    "bytes overflow": ("size-overflow", one(dtype="F64", shape=[2**61])),
    "overflow before a zero": ("size-overflow", one(shape=[2**63, 2, 0])),
    "half a byte": ("partial-byte", one(dtype="F4")),
    "three quarters of a byte": ("partial-byte", one(dtype="F6_E2M3")),
    "offsets reversed": ("invalid-offsets", one(data_offsets=[1, 0])),
    "one offset": ("invalid-offsets", one(data_offsets=[1])),
    "three offsets": ("invalid-offsets", one(data_offsets=[0, 1, 1])),
    "negative offset": ("invalid-offsets", one(data_offsets=[-1, 0])),
    "offset with a fraction": ("invalid-offsets", one(data_offsets=[0, 1.0])),
    "offset of 64 bits": ("invalid-offsets", one(data_offsets=[0, 2**64])),
    "span too long": ("tensor-size", one(data_offsets=[0, 2])),
    "span too short": ("tensor-size", one(dtype="F32")),
    "hole at the beginning": ("offset-gap", one(data_offsets=[1, 2])),
    "hole in between": (
        "offset-gap", message({"a": entry("U8", [1], [0, 1]), "b": entry("U8", [1], [2, 3])}, b"abc")),
    "empty tensor beyond the end": ("offset-gap", message({"a": entry("U8", [0], [5, 5])})),
    "overlap": (
        "offset-overlap", message({"a": entry("U8", [2], [0, 2]), "b": entry("U8", [2], [1, 3])}, b"abc")),
    "two in one place": (
        "offset-overlap", message({"a": entry("U8", [2], [0, 2]), "b": entry("U8", [2], [0, 2])}, b"ab")),
    "data cut short": ("data-truncated", one()[:-1]),
    "data goes on": ("trailing-data", one() + b"\0"),
}

STRICTER: dict[str, tuple[str, bytes]] = {
    "white space before it": ("header-start", message(" {}")),
    "line break behind it": ("header-padding", message("{}\n")),
    "tensor twice": BROKEN["tensor twice"],
    "metadata key twice": BROKEN["metadata key twice"],
    "metadata is null": ("invalid-metadata", message('{"__metadata__":null}')),
    "further field": ("invalid-entry", one(stride=[1])),
    "entry is a list": ("invalid-entry", message('{"a":["U8",[1],[0,1]]}', b"\0")),
    "entry of 20000 characters": ("invalid-entry", rewritten(b"[1]", b"[1" + b" " * 20_000 + b"]")),
    "dtype is an object": ("invalid-entry", one(dtype={"U8": None})),
    "65 dimensions": ("invalid-shape", one(shape=[1] * 65)),
    "overflow behind a zero": (
        "size-overflow", message({"a": entry("U8", [0, 2**62, 2], [0, 0])})),
}
# fmt: on


@pytest.mark.parametrize("case", BROKEN)
def test_the_error_names_the_rule(case: str) -> None:
    """The error names the rule that is broken, and its message the file."""
    rule, broken = BROKEN[case]
    with rule_broken(rule, match="some file") as caught:
        parse_message(broken, "some file")
    assert len(str(caught.value)) < 500
    assert pickle.loads(pickle.dumps(caught.value)).rule == rule


def test_every_rule_is_shown() -> None:
    """No rule is without a broken header above, except the one on the number of names, which is below."""
    shown = {rule for rule, _ in BROKEN.values()}
    assert shown == set(get_args(SafetensorsRule)) - {"too-many-tensors"}


@pytest.mark.parametrize("case", sorted(BROKEN.keys() - STRICTER.keys() - {"name twice, spelled differently"}))
def test_the_library_refuses_them_too(case: str) -> None:
    """Input that breaks a rule here breaks it for the safetensors library, except for the cases listed as stricter."""
    with pytest.raises(SafetensorError):
        deserialize(BROKEN[case][1])


@pytest.mark.parametrize("case", STRICTER)
def test_stricter_than_the_library(case: str) -> None:
    """What the module's documentation lists as stricter is refused here and taken by the library."""
    rule, strict = STRICTER[case]
    deserialize(strict)
    with rule_broken(rule):
        parse_message(strict, "m")


@pytest.mark.parametrize(("header", "nbytes"), good_headers())
def test_good_headers(header: dict[str, dict[str, object]], nbytes: int) -> None:
    """What keeps the rules is read as it was written, in the order of the data."""
    data = bytes(range(nbytes))
    text = json.dumps(header).encode()
    parsed = parse_message(message(text + b" " * 7, data), "m")
    assert parsed.metadata == header.pop("__metadata__", {})
    assert parsed.data_start == 8 + len(text) + 7
    assert {
        name: {
            "dtype": row.name,
            "shape": [*shape],
            "data_offsets": [offset - parsed.data_start, offset - parsed.data_start + nbytes],
        }
        for name, (row, shape, offset, nbytes) in parsed.tensors.items()
    } == header
    begins = [stored.offset for stored in parsed.tensors.values()]
    assert begins == sorted(begins)


@pytest.mark.parametrize(
    ("rule", "tensors", "metadata"),
    [
        ("unknown-dtype", [("a", "F31", [1])], None),
        ("invalid-shape", [("a", "U8", [1] * 65)], None),
        ("invalid-shape", [("a", "U8", [True])], None),
        ("invalid-shape", [("a", "U8", [-1])], None),
        ("size-overflow", [("a", "U8", [2**63])], None),
        ("size-overflow", [("a", "U8", [2**63, 0])], None),
        ("size-overflow", [(name, "U8", [2**62]) for name in "abc"], None),
        ("partial-byte", [("a", "F4", [1])], None),
        ("invalid-metadata", [], {"a": 1}),
        ("invalid-metadata", [], {1: "a"}),
    ],
)
def test_the_writer_keeps_the_rules(rule: str, tensors: list[tuple[str, str, list[int]]], metadata) -> None:
    """A header that the reader would refuse is not written, with the same rule as the reason."""
    with rule_broken(rule):
        encode_header(tensors, metadata, where="m")


@pytest.mark.parametrize("names", [["a", "a"], ["__metadata__"], ["\ud800"]])
def test_the_writer_checks_names(names: list[str]) -> None:
    """A name occurs once, is not the key of the metadata, and is text that UTF-8 can encode."""
    with pytest.raises(SaveError):
        encode_header([(name, "U8", [1]) for name in names], where="m")


def test_growing_header() -> None:
    """A header to which tensors are added is valid after each of them, in the same room, and must fit in it."""
    header, data = GrowingHeader(128, "m"), b""
    start = bytearray(header.empty)
    assert parse_message(start, "m").tensors == {}
    for name, value in (("a", b"abc"), ('"é', b"de")):
        added, at = header.append(name, "U8", [len(value)])
        start[at : at + len(added)] = added
        data += value
        assert len(start) == 128
        stored = parse_message(start + data, "m").tensors[name]
        assert (start + data)[stored.offset : stored.offset + stored.nbytes] == value
    for name in ("__metadata__", "\ud800"):
        with pytest.raises(SaveError):
            header.append(name, "U8", [1])
    with pytest.raises(AssertionError):
        header.append("c", "U8", [1])


def test_white_space_inside() -> None:
    """JSON's white space is allowed between any two tokens."""
    spaced = one()[8:-1]
    for piece in (b"{", b"}", b"[", b"]", b":", b","):
        spaced = spaced.replace(piece, b" \t\r\n" + piece + b" \t\r\n")
    assert parse_message(message(spaced.strip(), b"\0"), "m").tensors["a"].shape == (1,)


def test_the_most_that_is_allowed() -> None:
    """64 dimensions and 63 bits of elements are read, as long as the data is there for them."""
    header = {"a": entry("U8", [1] * 64, [0, 1]), "b": entry("U8", [0, 2**63 - 1], [1, 1])}
    assert parse_message(message(header, b"\0"), "m").tensors["b"].shape == (0, 2**63 - 1)


def test_a_header_may_be_limited_further() -> None:
    """A reader of a message sets the maximum length of a header before any of it arrives."""
    with rule_broken("header-too-large"):
        header_length((1000).to_bytes(8, "little"), "a peer", max_header_bytes=999)
    assert header_length((1000).to_bytes(8, "little"), "a peer", max_header_bytes=1000) == 1000


def test_header_of_a_file_is_checked_against_its_length(tmp_path) -> None:
    """A giant length costs nothing when the file is short, and a file must end where its header requires."""
    path = tmp_path / "m.safetensors"
    path.write_bytes((99_999_999).to_bytes(8, "little") + b"{}")
    with rule_broken("header-truncated", match="fetch it again"):
        read_header(TensorFile(path))
    path.write_bytes(one()[:-1])
    with rule_broken("data-truncated", match="fetch it again"):
        read_header(TensorFile(path))


def test_too_many_names(monkeypatch) -> None:
    """The number of names is limited, since each takes far more memory than text."""
    monkeypatch.setattr(_strict_json, "MAX_MEMBERS", 3)
    names = {str(number): entry() for number in range(3)}
    assert len(parse_header(json.dumps(names).encode(), "m").tensors) == 3
    with rule_broken("too-many-tensors"):
        encode_header([(name, "U8", [0]) for name in "abcd"], where="m")
    with rule_broken("too-many-tensors"):
        parse_header(json.dumps({**names, "more": entry()}).encode(), "m")


@pytest.mark.parametrize("shape", ["0", "0,{}"], ids=["one shape", "different shapes"])
def test_the_most_names_take_a_quarter_of_a_gigabyte(tmp_path, shape: str) -> None:
    """And a small multiple of the header: short names and empty tensors take the most for their bytes."""
    count = 20_000
    members = (f'"{n:x}":{{"dtype":"U8","shape":[{shape.format(n)}],"data_offsets":[0,0]}}' for n in range(count))
    text = f"{{{','.join(members)}}}".encode()
    path = tmp_path / "many.safetensors"
    path.write_bytes(message(text))
    tracemalloc.start()
    try:
        assert len(open_safetensors(path)) == count
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken < 16 * len(text)
    assert taken / count * _strict_json.MAX_MEMBERS < 320 << 20
    # The largest mixtures of experts have 200,000 tensors.
    assert _strict_json.MAX_MEMBERS >= 400_000


def test_lists_nested_as_deep_as_an_entry_may_be_long() -> None:
    """Recursion ends in an error of this package, whether or not this Python's JSON parser reaches the bottom."""
    with pytest.raises(SafetensorsError) as caught:
        parse_message(rewritten(b"[1]", b"[" * 8000 + b"]" * 8000), "m")
    assert caught.value.rule in ("header-json", "invalid-shape")


MEGA = 1 << 20
ATTACKS: dict[str, bytes] = {
    "deep lists": b'{"a":' + b"[" * (4 * MEGA),
    "deep objects": b'{"a":' + b'{"a":' * MEGA,
    "deep in an entry": b'{"a":{"shape":' + b"[" * (4 * MEGA),
    "empty lists in a further field": b'{"a":{"x":[' + b"[]," * MEGA + b"[]]}}",
    "empty objects in a further field": b'{"a":{"x":[' + b"{}," * MEGA + b"{}]}}",
    "many dimensions": b'{"a":{"dtype":"U8","shape":[' + b"1," * (2 * MEGA) + b'1],"data_offsets":[0,1]}}',
    "long number": b'{"a":{"dtype":"U8","shape":[' + b"9" * (4 * MEGA) + b'],"data_offsets":[0,1]}}',
    "long name": b'{"' + b"n" * (4 * MEGA) + b'":1}',
    "long name of escapes": b'{"' + rb"\"" * (2 * MEGA) + b'":1}',
    "long name of backslashes": b'{"' + rb"\\" * (2 * MEGA) + b'":1}',
    "name that does not end": b'{"' + rb"\u00e4" * (MEGA // 2),
    "white space": b"{" + b" \n" * (2 * MEGA),
    "metadata of lists": b'{"__metadata__":{"a":[' + b"[]," * MEGA + b"]}}",
    "padding": b"{}" + b" " * (4 * MEGA) + b"!",
    "one name again and again": b"{" + b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},' * (MEGA // 16) + b"}",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks(attack: str) -> None:
    """An attack ends soon, in an error of this package, and takes no more memory than a few times its own size."""
    text = ATTACKS[attack]
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(FormatError) as caught:
            parse_header(text, "m")
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 10
    # One copy as text; two more for a name that fills almost the whole header.
    assert taken < 4 * len(text) + MEGA
    assert len(str(caught.value)) < 500
