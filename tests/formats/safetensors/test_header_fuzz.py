# SPDX-License-Identifier: Apache-2.0
"""The strict reader against the safetensors library, over headers that were broken at random."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from nvflare_lazy.errors import SafetensorsError, SafetensorsRule
from nvflare_lazy.formats.safetensors.header import SafetensorsHeader, encode_header, end_of, parse_message
from nvflare_lazy.tensors.dtypes import ELEMENT_TYPES
from tests.formats.safetensors.header_mutations import message, mutated_texts

HEADERS_A_SEED = 15_000


@pytest.mark.parametrize("seed", range(4))
def test_mutated_headers(seed: int) -> None:
    """Both refuse or both read the same; where the library alone reads, the reason is a documented strictness."""
    agreed, stricter = 0, 0
    for text, nbytes in mutated_texts(seed, HEADERS_A_SEED):
        whole = message(text, bytes(index % 251 for index in range(nbytes)))
        ours, theirs = read_ours(whole), read_theirs(whole)
        if isinstance(ours, SafetensorsHeader):
            assert theirs is not None, f"only we read {text!r}"
            assert as_theirs(ours, whole) == theirs, text
            agreed += 1
        elif theirs is not None:
            assert ours.rule in strictness(text), f"only the library reads {text!r}; we say {ours}"
            stricter += 1
    # Broken beyond recognition, they would show nothing.
    assert agreed > HEADERS_A_SEED // 10
    assert stricter > HEADERS_A_SEED // 100


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
DTYPES = st.sampled_from([row.name for row in ELEMENT_TYPES if row.name])


@settings(max_examples=300)
@given(
    tensors=st.dictionaries(
        NAMES.filter("__metadata__".__ne__), st.tuples(DTYPES, st.lists(st.integers(0, 5), max_size=4)), max_size=6
    ),
    metadata=st.dictionaries(NAMES, NAMES, max_size=3),
)
def test_whatever_we_lay_out_both_read(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    """Any names, types and shapes that make whole bytes are written so that the library reads the same."""
    promised = [(name, dtype, shape) for name, (dtype, shape) in tensors.items()]
    try:
        start, contents = encode_header(promised, metadata, where="m")
    except SafetensorsError as error:
        if error.rule != "partial-byte":
            raise
        return
    whole = start + bytes(end_of(contents, len(start)) - len(start))
    parsed = parse_message(whole, "m")
    assert parsed.metadata == metadata
    assert parsed.tensors == contents
    assert [(name, stored.element_type.name, [*stored.shape]) for name, stored in contents.items()] == promised
    assert len(start) % 8 == 0
    assert as_theirs(parsed, whole) == read_theirs(whole)


def read_ours(whole: bytes) -> SafetensorsHeader | SafetensorsError:
    try:
        return parse_message(whole, "m")
    except SafetensorsError as error:
        return error


def read_theirs(whole: bytes) -> dict[str, tuple[str, list[int], bytes]] | None:
    try:
        found = deserialize(whole)
    except SafetensorError:
        return None
    return {name: (view["dtype"], list(view["shape"]), bytes(view["data"])) for name, view in found}


def as_theirs(header: SafetensorsHeader, whole: bytes) -> dict[str, tuple[str | None, list[int], bytes]]:
    return {
        name: (row.name, list(shape), whole[offset : offset + nbytes])
        for name, (row, shape, offset, nbytes) in header.tensors.items()
    }


def strictness(text: bytes) -> set[str]:
    """Return the rules by which the strict reader may refuse a text that the library reads, worked out afresh."""
    reasons: set[str] = set()
    if text[:1] != b"{":
        reasons.add("header-start")
    if text.rstrip(b" ")[-1:] != b"}":
        reasons.add("header-padding")
    repeated: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated.extend(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
        return dict(pairs)

    header = json.loads(text, object_pairs_hook=collect)
    if repeated:
        # The library uses the last of them and ignores the others.
        return set(get_args(SafetensorsRule))
    if "__metadata__" in header and header["__metadata__"] is None:
        reasons.add("invalid-metadata")
    for entry in (value for name, value in header.items() if name != "__metadata__"):
        if not isinstance(entry, dict) or len(entry) > 3 or not isinstance(entry["dtype"], str):
            reasons.add("invalid-entry")
        elif len(entry["shape"]) > 64:
            reasons.add("invalid-shape")
        elif 0 in entry["shape"]:
            reasons.add("size-overflow")
    return reasons
