# SPDX-License-Identifier: Apache-2.0
"""The manifest of tensors: a written manifest is read again, and an impossible one is refused."""

from __future__ import annotations

import contextlib

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvflare_lazy.errors import ProtocolError
from nvflare_lazy.transport._backends import NUMPY, TORCH
from nvflare_lazy.transport.segments import manifest as manifests

TYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.uint8]
ITEM = st.tuples(
    st.sampled_from(TYPES),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.one_of(st.none(), st.integers(0, 3)),
)


def described(items):
    for index, (dtype, shape, key) in enumerate(items):
        yield manifests.default_name(index), dtype, shape, TORCH.nbytes(dtype, shape), key


@given(st.lists(ITEM, max_size=30))
def test_round_trip(items):
    """Names, types, shapes and places come back, and tensors with the same bytes share their place."""
    laid = manifests.lay_out(described(items))
    read = manifests.decode(manifests.encode(laid, TORCH), TORCH, "site-1")
    fields = [[getattr(item, name) for name in manifests.ManifestItem.__slots__] for item in laid.items]
    assert [[getattr(item, name) for name in manifests.ManifestItem.__slots__] for item in read.items] == fields
    assert read.nbytes == sum(item.nbytes for item in read.stored())


@given(st.binary(max_size=200))
def test_rubbish(data):
    """Any bytes are either a list or a named error."""
    with contextlib.suppress(ProtocolError):
        manifests.decode(data, TORCH, "site-1")


@given(st.lists(ITEM, min_size=1, max_size=10), st.data())
def test_damage(items, data):
    """A list with one byte changed is a list or a named error, and never claims more than it holds."""
    encoded = bytearray(manifests.encode(manifests.lay_out(described(items)), TORCH))
    place = data.draw(st.integers(0, len(encoded) - 1))
    encoded[place] = data.draw(st.integers(0, 255))
    try:
        read = manifests.decode(encoded, TORCH, "site-1")
    except ProtocolError:
        return
    assert all(item.offset + item.nbytes <= read.nbytes for item in read.items)


def test_names_that_travel():
    """NVFlare's own names take no space; others travel."""
    usual = manifests.lay_out((f"T{i}", torch.int8, (1,), 1, None) for i in range(1000))
    own = manifests.lay_out((f"layer.{i}.weight", torch.int8, (1,), 1, None) for i in range(1000))
    assert len(manifests.encode(usual, TORCH)) < 11_000
    assert [item.name for item in manifests.decode(manifests.encode(own, TORCH), TORCH, "x").items][999] == (
        "layer.999.weight"
    )


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype(">f8"),
        np.dtype("U7"),
        np.dtype("S3"),
        np.dtype("M8[us]"),
        np.dtype([("a", "<i4"), ("b", "<f8", (2, 3))]),
        np.dtype([("a", [("c", "<i2"), ("d", "<U4")])]),
    ],
    ids=str,
)
def test_types_of_arrays(dtype):
    """Every type that NumPy can save without help can be announced."""
    laid = manifests.lay_out([("a", dtype, (3,), NUMPY.nbytes(dtype, (3,)), None)])
    assert manifests.decode(manifests.encode(laid, NUMPY), NUMPY, "x").items[0].dtype == dtype


@pytest.mark.parametrize("encoded", ["|O", "f33", 7, None, [["a"]], ["a", "b"], "4,", "(999999,999999)f8,i4", "V-1"])
def test_types_that_are_none(encoded):
    """Types that do not exist, or would run code when read."""
    data = b"".join(msgpack.packb(x) for x in ([1, "numpy", 1, 0], [None, encoded, [0], None]))
    with pytest.raises(ProtocolError):
        manifests.decode(data, NUMPY, "site-1")


def test_kinds_do_not_mix():
    """A list of arrays is not taken for one of tensors."""
    laid = manifests.lay_out([("a", np.dtype("f4"), (3,), 12, None)])
    with pytest.raises(ProtocolError, match="a list of torch, got version 1 of 'numpy'"):
        manifests.decode(manifests.encode(laid, NUMPY), TORCH, "site-1")
