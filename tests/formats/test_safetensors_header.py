# SPDX-License-Identifier: Apache-2.0
"""The rules of the safetensors header, one by one, and what attackers make of them."""

from __future__ import annotations

import json
import time
import tracemalloc

import pytest
from safetensors import SafetensorError, deserialize

from nvflare_lazy import errors
from nvflare_lazy.errors import FormatError, SafetensorsError
from nvflare_lazy.formats import strict_json
from nvflare_lazy.formats.safetensors_header import header_length, parse_header, parse_message, read_header
from nvflare_lazy.tensors.byte_source import OpenFile
from tests.formats.header_mutations import entry, good_headers, message


def one(**changes: object) -> bytes:
    """Return a message with one tensor of one byte, its entry changed."""
    return message({"a": {**entry("U8", [1], [0, 1]), **changes}}, b"\0")


def rewritten(old: bytes, new: bytes) -> bytes:
    """Return the same message with the text of its header changed."""
    return message(one()[8:-1].replace(old, new), b"\0")


# fmt: off
BROKEN: dict[str, tuple[type[SafetensorsError], bytes]] = {
    "empty": (errors.HeaderTruncatedError, b""),
    "no length": (errors.HeaderTruncatedError, b"\x02\0\0\0\0\0\0"),
    "header cut short": (errors.HeaderTruncatedError, message("{}")[:-1]),
    "header over 100 MB": (errors.HeaderTooLargeError, (100_000_001).to_bytes(8, "little") + b"{}"),
    "header of 16 EiB": (errors.HeaderTooLargeError, b"\xff" * 8 + b"{}"),
    "no header": (errors.HeaderStartError, message("")),
    "a list": (errors.HeaderStartError, message("[]")),
    "byte order mark": (errors.HeaderStartError, message("\ufeff{}")),
    "not UTF-8 in a name": (errors.HeaderEncodingError, message(b'{"\xff":1}')),
    "surrogate in UTF-8": (errors.HeaderEncodingError, message(b'{"\xed\xa0\x80":1}')),
    "half a surrogate pair": (errors.HeaderEncodingError, message(r'{"\ud800":1}')),
    "no quotes": (errors.HeaderJsonError, message("{a:1}")),
    "ends early": (errors.HeaderJsonError, message('{"a"')),
    "unknown escape": (errors.HeaderJsonError, message(r'{"\x41":1}')),
    "line break in a name": (errors.HeaderJsonError, message('{"a\n":1}')),
    "trailing comma": (errors.HeaderJsonError, message('{"__metadata__":{},}')),
    "leading zero": (errors.HeaderJsonError, rewritten(b"[1]", b"[01]")),
    "NUL behind it": (errors.HeaderPaddingError, message("{}\0")),
    "two objects": (errors.HeaderPaddingError, message("{}{}")),
    "tensor twice": (errors.DuplicateKeyError, message('{"a":%s,"a":%s}' % ((json.dumps(entry()),) * 2))),
    "name twice, spelled differently": (
        errors.DuplicateKeyError, message('{"a":%s,"\\u0061":%s}' % ((json.dumps(entry()),) * 2))),
    "metadata key twice": (errors.DuplicateKeyError, message('{"__metadata__":{"a":"1","a":"1"}}')),
    "metadata twice": (errors.DuplicateKeyError, message('{"__metadata__":{},"__metadata__":{}}')),
    "field twice": (errors.DuplicateKeyError, rewritten(b'"shape"', b'"shape":[1],"shape"')),
    "metadata is a list": (errors.InvalidMetadataError, message('{"__metadata__":[]}')),
    "metadata holds a number": (errors.InvalidMetadataError, message('{"__metadata__":{"a":1}}')),
    "metadata holds an object": (errors.InvalidMetadataError, message('{"__metadata__":{"a":{}}}')),
    "entry is a number": (errors.InvalidEntryError, message('{"a":1}')),
    "entry is null": (errors.InvalidEntryError, message('{"a":null}')),
    "entry without dtype": (errors.InvalidEntryError, message('{"a":{"shape":[0],"data_offsets":[0,0]}}')),
    "unknown dtype": (errors.UnknownDtypeError, one(dtype="U9")),
    "dtype in small letters": (errors.UnknownDtypeError, one(dtype="u8")),
    "dtype is null": (errors.UnknownDtypeError, one(dtype=None)),
    "shape is a number": (errors.InvalidShapeError, one(shape=1)),
    "negative size": (errors.InvalidShapeError, one(shape=[-1])),
    "minus zero": (errors.InvalidShapeError, rewritten(b"[1]", b"[-0]")),
    "size with a fraction": (errors.InvalidShapeError, one(shape=[1.0])),
    "size with an exponent": (errors.InvalidShapeError, rewritten(b"[1]", b"[1e0]")),
    "size is true": (errors.InvalidShapeError, one(shape=[True])),
    "size is text": (errors.InvalidShapeError, one(shape=["1"])),
    "size is NaN": (errors.InvalidShapeError, one(shape=[float("nan")])),
    "size of 64 bits": (errors.SizeOverflowError, one(shape=[2**64])),
    "size of 5000 digits": (errors.SizeOverflowError, rewritten(b"[1]", b"[" + b"9" * 5000 + b"]")),
    "product overflows to zero": (errors.SizeOverflowError, one(shape=[2**32, 2**32])),
    "bytes overflow": (errors.SizeOverflowError, one(dtype="F64", shape=[2**61])),
    "overflow before a zero": (errors.SizeOverflowError, one(shape=[2**63, 2, 0])),
    "half a byte": (errors.PartialByteError, one(dtype="F4")),
    "three quarters of a byte": (errors.PartialByteError, one(dtype="F6_E2M3")),
    "offsets reversed": (errors.InvalidOffsetsError, one(data_offsets=[1, 0])),
    "one offset": (errors.InvalidOffsetsError, one(data_offsets=[1])),
    "three offsets": (errors.InvalidOffsetsError, one(data_offsets=[0, 1, 1])),
    "negative offset": (errors.InvalidOffsetsError, one(data_offsets=[-1, 0])),
    "offset with a fraction": (errors.InvalidOffsetsError, one(data_offsets=[0, 1.0])),
    "offset of 64 bits": (errors.InvalidOffsetsError, one(data_offsets=[0, 2**64])),
    "span too long": (errors.TensorSizeError, one(data_offsets=[0, 2])),
    "span too short": (errors.TensorSizeError, one(dtype="F32")),
    "hole at the beginning": (errors.OffsetGapError, one(data_offsets=[1, 2])),
    "hole in between": (
        errors.OffsetGapError, message({"a": entry("U8", [1], [0, 1]), "b": entry("U8", [1], [2, 3])}, b"abc")),
    "empty tensor beyond the end": (errors.OffsetGapError, message({"a": entry("U8", [0], [5, 5])})),
    "overlap": (
        errors.OffsetOverlapError, message({"a": entry("U8", [2], [0, 2]), "b": entry("U8", [2], [1, 3])}, b"abc")),
    "two in one place": (
        errors.OffsetOverlapError, message({"a": entry("U8", [2], [0, 2]), "b": entry("U8", [2], [0, 2])}, b"ab")),
    "data cut short": (errors.DataTruncatedError, one()[:-1]),
    "data goes on": (errors.TrailingDataError, one() + b"\0"),
}

STRICTER: dict[str, tuple[type[SafetensorsError], bytes]] = {
    "white space before it": (errors.HeaderStartError, message(" {}")),
    "line break behind it": (errors.HeaderPaddingError, message("{}\n")),
    "tensor twice": BROKEN["tensor twice"],
    "metadata key twice": BROKEN["metadata key twice"],
    "metadata is null": (errors.InvalidMetadataError, message('{"__metadata__":null}')),
    "further field": (errors.InvalidEntryError, one(stride=[1])),
    "entry is a list": (errors.InvalidEntryError, message('{"a":["U8",[1],[0,1]]}', b"\0")),
    "entry of 20000 characters": (errors.InvalidEntryError, rewritten(b"[1]", b"[1" + b" " * 20_000 + b"]")),
    "dtype is an object": (errors.InvalidEntryError, one(dtype={"U8": None})),
    "65 dimensions": (errors.InvalidShapeError, one(shape=[1] * 65)),
    "overflow behind a zero": (
        errors.SizeOverflowError, message({"a": entry("U8", [0, 2**62, 2], [0, 0])})),
}
# fmt: on


@pytest.mark.parametrize("case", BROKEN)
def test_each_rule_has_its_error(case: str) -> None:
    """A broken rule raises the error that is named after it, and the message says which file it is about."""
    error, broken = BROKEN[case]
    with pytest.raises(error, match="some file") as caught:
        parse_message(broken, "some file")
    assert type(caught.value) is error
    assert len(str(caught.value)) < 500


def test_every_error_is_shown() -> None:
    """No rule of the tree is without a broken header above, but the one on the number of names, which is below."""
    shown = {error for error, _ in BROKEN.values()}
    assert shown == set(SafetensorsError.__subclasses__()) - {errors.TooManyTensorsError}


@pytest.mark.parametrize("case", BROKEN.keys() - STRICTER.keys() - {"name twice, spelled differently"})
def test_the_library_refuses_them_too(case: str) -> None:
    """What breaks a rule here breaks it for the safetensors library, except for what is listed as stricter."""
    with pytest.raises(SafetensorError):
        deserialize(BROKEN[case][1])


@pytest.mark.parametrize("case", STRICTER)
def test_stricter_than_the_library(case: str) -> None:
    """What the module's documentation lists as stricter is refused here and taken by the library."""
    error, strict = STRICTER[case]
    deserialize(strict)
    with pytest.raises(error):
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
        name: {"dtype": span.element_type.name, "shape": list(span.shape), "data_offsets": [span.begin, span.end]}
        for name, span in parsed.tensors.items()
    } == header
    begins = [span.begin for span in parsed.tensors.values()]
    assert begins == sorted(begins)


def test_white_space_inside() -> None:
    """JSON's white space may stand between any two pieces."""
    spaced = one()[8:-1]
    for piece in (b"{", b"}", b"[", b"]", b":", b","):
        spaced = spaced.replace(piece, b" \t\r\n" + piece + b" \t\r\n")
    assert parse_message(message(spaced.strip(), b"\0"), "m").tensors["a"].shape == (1,)


def test_the_most_that_is_allowed() -> None:
    """64 dimensions and 63 bits of elements are read, as long as the data is there for them."""
    header = {"a": entry("U8", [1] * 64, [0, 1]), "b": entry("U8", [0, 2**63 - 1], [1, 1])}
    assert parse_message(message(header, b"\0"), "m").tensors["b"].shape == (0, 2**63 - 1)


def test_a_header_may_be_limited_further() -> None:
    """Who reads from the wire says how long a header may be, before any of it is there."""
    with pytest.raises(errors.HeaderTooLargeError):
        header_length((1000).to_bytes(8, "little"), "a peer", max_header_bytes=999)
    assert header_length((1000).to_bytes(8, "little"), "a peer", max_header_bytes=1000) == 1000


def test_header_of_a_file_is_checked_against_its_length(tmp_path) -> None:
    """A giant length costs nothing when the file is short, and a file must end where its header says."""
    path = tmp_path / "m.safetensors"
    path.write_bytes((99_999_999).to_bytes(8, "little") + b"{}")
    with pytest.raises(errors.HeaderTruncatedError, match="fetch it again"):
        read_header(OpenFile(path))
    path.write_bytes(one()[:-1])
    with pytest.raises(errors.DataTruncatedError, match="fetch it again"):
        read_header(OpenFile(path))


def test_too_many_names(monkeypatch) -> None:
    """The number of names is limited, since each takes far more memory than text."""
    monkeypatch.setattr(strict_json, "_MOST_MEMBERS", 3)
    names = {str(number): entry() for number in range(3)}
    assert len(parse_header(json.dumps(names).encode(), "m").tensors) == 3
    with pytest.raises(errors.TooManyTensorsError):
        parse_header(json.dumps({**names, "more": entry()}).encode(), "m")


def test_lists_nested_as_deep_as_an_entry_may_be_long() -> None:
    """Recursion ends in an error of ours, whether or not this Python's JSON parser gets to the bottom."""
    with pytest.raises((errors.HeaderJsonError, errors.InvalidShapeError)):
        parse_message(rewritten(b"[1]", b"[" * 8000 + b"]" * 8000), "m")


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
    """An attack ends soon, in an error of ours, and takes no more memory than a few times its own size."""
    text = ATTACKS[attack]
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(FormatError) as caught:
            parse_header(text, "m")
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 10
    # One copy as text; two more for a name that is almost all of it.
    assert taken < 4 * len(text) + MEGA
    assert len(str(caught.value)) < 500
