# SPDX-License-Identifier: Apache-2.0
"""An item of NVFlare is one tensor or one array: every other byte string is a named error, within little memory."""

from __future__ import annotations

import io
import json
import struct
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvflare_lazy.errors import ProtocolError
from nvflare_lazy.transport.nvflare_items.format import pack_array, unpack_arrays, unpack_tensors

ARRAYS = [
    np.arange(24.0).reshape(2, 3, 4),
    np.array(3.5),
    np.zeros((0, 4)),
    np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    np.arange(4, dtype=">f4"),
    np.array(["one", "seventeen"]),
    np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")]),
    np.array([True, False]),
]


def npz(**arrays):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def with_member(member, name="w.npy", **kwargs):
    """An archive with any bytes as its only member, and a correct checksum."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", **kwargs) as archive, archive.open(name, "w", force_zip64=True) as file:
        file.write(member)
    return stream.getvalue()


def npy(header, data=b"", version=(1, 0)):
    """An array file with any text as its header."""
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version == (1, 0) else "<I", len(text)) + text + data


def described(descr="'<f8'", fortran=False, shape="(3,)"):
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


def unpack(item):
    ((name, dtype, shape, data),) = unpack_arrays(item, "site-1")
    return name, np.frombuffer(data, dtype).reshape(shape) if dtype.itemsize else np.empty(shape, dtype)


def with_peak(item, unpack):
    """The error or None, and the memory that was used at most."""
    tracemalloc.start()
    try:
        for *_, data in unpack(item, "site-1"):
            assert len(data) <= len(item)
        error = None
    except ProtocolError as caught:
        error = caught
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return error, peak


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype.str} {array.shape}")
@pytest.mark.parametrize("name", ["w", "layer/ü.weight", "a" * 3000])
def test_arrays_of_nvflare(array, name):
    """What NVFlare and this package send is read with its exact values."""
    for item in (npz(**{name: array}), pack_array(name, array)):
        found, value = unpack(item)
        assert found == name
        assert value.dtype == array.dtype
        np.testing.assert_array_equal(value, array)


def test_archive_of_more_than_2_gib():
    """A larger array has further records at the end, which are read without its bytes in memory twice."""
    pytest.importorskip("resource")
    small = with_member(npy(described(shape="(0,)")))
    directory = small.index(b"PK\1\2")
    size = small.index(b"PK\5\6") - directory
    wide = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, size, directory)
    locator = struct.pack("<4s2IQ", b"PK\6\7", 0, directory + size, 1)
    end = directory + size
    assert unpack(small[:end] + wide + locator + small[end:])[0] == "w"
    forged = wide[:-32] + struct.pack("<4Q", 2000, 2000, size, directory)
    with pytest.raises(ProtocolError, match="more than one member"):
        unpack(small[:end] + forged + locator + small[end:])


def one_member_listed(times):
    """An archive whose directory names the same member again and again."""
    stream = io.BytesIO(npz(w=np.zeros(1 << 17)))
    with zipfile.ZipFile(stream, "a") as archive:
        (info,) = archive.infolist()
        archive.filelist.extend([info] * (times - 1))
        archive._didModify = True
    return stream.getvalue()


DEEP = "(" * 4000 + ")" * 4000
HOSTILE_ARRAYS = {
    "one member 2,000 times": one_member_listed(2000),
    "one member twice": one_member_listed(2),
    "two members": npz(a=np.zeros(3), b=np.zeros(3)),
    "no member": npz(),
    "compressed": with_member(npy(described(shape="(1000000,)"), bytes(8_000_000)), compression=zipfile.ZIP_DEFLATED),
    "bytes before": b"x" + npz(w=np.zeros(3)),
    "bytes after": npz(w=np.zeros(3)) + b"x",
    "a comment": npz(w=np.zeros(3))[:-2] + b"\1\0x",
    "not an array": with_member(b"text", name="w.txt"),
    "a directory": with_member(b"", name="w/"),
    "no npy": with_member(b"text"),
    "objects": with_member(npy(described("'|O'", shape="(1,)"), bytes(8))),
    "hidden objects": with_member(npy(described("[('a', '|O')]", shape="(1,)"), bytes(8))),
    "subarrays": with_member(npy(described("('<f8', (1000,))", shape="(1,)"), bytes(8000))),
    "shape bomb": with_member(npy(described(shape=f"({1 << 62},)"), bytes(24))),
    "hidden shape bomb": with_member(npy(described(shape=f"(0, {1 << 62})"))),
    "elements without bytes": with_member(npy(described("'|V0'", shape=f"({1 << 62},)"))),
    "negative axes": with_member(npy(described(shape="(-1, -3)"), bytes(24))),
    "an axis that is true": with_member(npy(described(shape="(True, 3)"), bytes(24))),
    "65 axes": with_member(npy(described(shape=str((1,) * 65)), bytes(8))),
    "deep header": with_member(npy(described(shape=DEEP))),
    "many signs": with_member(npy(described(shape="-" * 9000 + "1"))),
    "long header": with_member(npy(described(shape="(3,)" + " " * 60_000), bytes(24))),
    "too few bytes": with_member(npy(described(), bytes(23))),
    "too many bytes": with_member(npy(described(), bytes(25))),
    "version 3": with_member(npy(described("[('ü', '<f8')]"), bytes(24), version=(3, 0))),
    "version 9": with_member(npy(described(), bytes(24), version=(9, 0))),
    "no header": with_member(npy("3")),
    "a call": with_member(npy("__import__('os').getpid()")),
}


@pytest.mark.parametrize("name", HOSTILE_ARRAYS)
def test_hostile_arrays(name):
    """A byte string that is not exactly the one array is a named error, and takes no more memory than it has bytes."""
    item = HOSTILE_ARRAYS[name]
    error, peak = with_peak(item, unpack_arrays)
    assert error is not None
    assert "site-1" in str(error)
    assert peak <= 4 * len(item) + (16 << 20)


def tensors(header, data=b""):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape, start, end, dtype="U8"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HOSTILE_TENSORS = {
    "no tensor": tensors({}),
    "two tensors": safetensors.torch.save({"a": torch.zeros(3), "b": torch.zeros(3)}),
    "thousands of empty tensors": tensors({f"n{i}": entry([0], 0, 0) for i in range(2_000)}),
    "only metadata": tensors({"__metadata__": {"a": "b"}}),
    "deep header": (b"\x40\x9c" + bytes(6) + b'{"a":' + b"[" * 19_995 + b"]" * 20_000),
    "hidden shape bomb": tensors({"a": entry([0, 1 << 62, 1 << 62], 0, 0)}),
    "bytes before": tensors({"a": entry([4], 4, 8)}, bytes(8)),
    "bytes after": tensors({"a": entry([4], 0, 4)}, bytes(8)),
}


@pytest.mark.parametrize("name", HOSTILE_TENSORS)
def test_hostile_tensors(name):
    """The same for tensors: exactly one."""
    item = HOSTILE_TENSORS[name]
    error, peak = with_peak(item, unpack_tensors)
    assert error is not None
    assert "site-1" in str(error)
    assert peak <= 4 * len(item) + (16 << 20)


GOOD_ITEMS = [npz(w=array) for array in ARRAYS]
NUMBERS = st.one_of(
    st.sampled_from([0, 1, 3, 255, 1 << 15, (1 << 16) - 1, 1 << 31, (1 << 32) - 1, 1 << 62]), st.integers(0, 300)
)


@st.composite
def mutated(draw, items):
    """An item with a few bytes changed, moved, repeated, removed or added; its checksum may be made right again."""
    item = bytearray(draw(st.sampled_from(items)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(item) - 1, 0)))
        kind = draw(st.sampled_from(["set", "number", "cut", "repeat", "insert", "truncate"]))
        length = draw(st.integers(1, 60))
        if kind == "set":
            item[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "number":
            width = draw(st.sampled_from([2, 4, 8]))
            item[at : at + width] = (draw(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == "cut":
            del item[at : at + length]
        elif kind == "repeat":
            item[at:at] = item[at : at + length] * draw(st.integers(1, 3))
        elif kind == "insert":
            item[at:at] = draw(st.binary(max_size=8))
        else:
            del item[-length:]
    directory = item.find(b"PK\1\2")
    if draw(st.booleans()) and item[:4] == b"PK\3\4" and directory > 0 and len(item) > directory + 20:
        start = 30 + int.from_bytes(item[26:28], "little") + int.from_bytes(item[28:30], "little")
        checksum = zlib.crc32(item[start:directory]).to_bytes(4, "little")
        item[14:18] = item[directory + 16 : directory + 20] = checksum
    return bytes(item)


@given(mutated(GOOD_ITEMS))
def test_mutated_arrays(item):
    """A damaged item is a named error, or what NumPy reads: no other exception, and not a byte more than it has."""
    try:
        name, value = unpack(item)
    except ProtocolError:
        return
    assert value.nbytes <= len(item)
    try:
        with np.load(io.BytesIO(item), allow_pickle=False) as archive:
            expected = archive[name]
    except Exception:
        return  # NumPy also reads fields that do not matter here, such as the version needed to extract
    assert value.dtype == expected.dtype
    assert value.shape == expected.shape
    assert value.tobytes() == expected.tobytes()


HEADERS = st.fixed_dictionaries(
    {
        "descr": st.one_of(
            st.sampled_from(["<f8", "|O", "|V0", "<U0", "(3,)f4", "f4,i8", "<M8[ns]", "i4:", "", "\0"]),
            st.recursive(
                st.tuples(st.sampled_from(["a", "b", "ü"]), st.sampled_from(["<f8", "|O", "|V9"])),
                lambda inner: st.one_of(st.lists(inner, max_size=3), st.tuples(st.just("c"), inner)),
                max_leaves=8,
            ),
            st.integers(),
        ),
        "fortran_order": st.sampled_from([True, False, 1, None]),
        "shape": st.one_of(st.lists(st.integers(-2, 1 << 63), max_size=4).map(tuple), st.text(max_size=3)),
    }
)


@pytest.mark.filterwarnings("ignore")  # NumPy's, about old names of types
@given(HEADERS, st.integers(0, 64), st.sampled_from([(1, 0), (2, 0), (3, 0)]))
def test_any_header(header, nbytes, version):
    """An array file with any header in a correct archive."""
    item = with_member(npy(repr(header), bytes(nbytes), version))
    try:
        _, value = unpack(item)
    except ProtocolError:
        return
    assert value.nbytes == nbytes


@given(mutated([safetensors.torch.save({"w": torch.arange(5)}), safetensors.torch.save({"w": torch.zeros(0, 4)})]))
def test_mutated_tensors(item):
    """The same for tensors."""
    try:
        ((_, dtype, shape, data),) = unpack_tensors(item, "site-1")
    except ProtocolError:
        return
    assert len(data) <= len(item)
    assert torch.empty(shape, dtype=dtype, device="meta").nbytes == len(data)
