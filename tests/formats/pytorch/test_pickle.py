# SPDX-License-Identifier: Apache-2.0
"""The unpickler reads plain data as Python's does, over all protocols, and runs nothing that Python's would run."""

from __future__ import annotations

import collections
import pickle
import pickletools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.storage import TypedStorage

from nvflare_lazy.errors import PyTorchCheckpointError
from nvflare_lazy.formats.pytorch import _machine, open_pytorch
from nvflare_lazy.formats.pytorch import _pickle as unpickler
from nvflare_lazy.formats.pytorch._stream import PickleStream
from nvflare_lazy.tensors.tensor_file import TensorFile
from tests.formats.pytorch import files

# Opcodes that no checkpoint needs, though Python knows them.
REFUSED = {
    "PERSID",  # only protocol 0, in which torch cannot save tensors
    "STRING",
    "DUP",
    "INST",
    "OBJ",
    "EXT1",
    "EXT2",
    "EXT4",
    "NEXT_BUFFER",
    "POP",  # only for tuples and objects that hold themselves
    "POP_MARK",
    "NEWOBJ_EX",
    "READONLY_BUFFER",
}


def unpickle(data: bytes, path, persistent_load=None) -> object:
    path.write_bytes(data)
    file = TensorFile(path)
    stream = PickleStream(file, 0, file.size)
    return unpickler.unpickle(stream, persistent_load or refuse)


def refuse(persistent_id: object) -> object:
    raise ValueError("no storages here")


KEYS = st.none() | st.booleans() | st.integers(-(2**59), 2**59) | st.floats(allow_nan=False) | st.text() | st.binary()
SCALAR_VALUES = KEYS | st.integers() | st.complex_numbers(allow_nan=False) | st.builds(bytearray, st.binary())
VALUES = st.recursive(
    SCALAR_VALUES | st.sets(KEYS) | st.frozensets(KEYS),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(KEYS, inner)
        | st.tuples(inner)
        | st.tuples(inner, inner)
        | st.tuples(inner, inner, inner)
        | st.tuples(inner, inner, inner, inner)
        | st.builds(collections.OrderedDict, st.dictionaries(KEYS, inner))
    ),
    max_leaves=20,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("pickles") / "file"


@given(value=VALUES, protocol=st.integers(1, 5), optimized=st.booleans())
def test_reads_plain_data_like_python(path, value, protocol, optimized):
    """All plain data that Python's pickler writes is read as equal objects of the same types."""
    data = pickle.dumps(value, protocol)
    if optimized:
        data = pickletools.optimize(data)
    found = unpickle(data, path)
    assert found == value
    assert _types(found) == _types(value)


@given(value=st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False))
def test_reads_numbers_of_protocol_0(path, value):
    """Numbers and containers of the text protocol occur in the first pickles of old files."""
    assert unpickle(pickle.dumps([value, {1: (value,)}], 0), path) == [value, {1: (value,)}]


def _types(value: object) -> object:
    """The types of a value and of all that is in it; an OrderedDict counts as the dict it becomes."""
    if isinstance(value, dict):
        return dict, [(_types(key), _types(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [_types(part) for part in value]
    return type(value)


def test_every_opcode_is_decided_on():
    """An opcode is either read or refused on purpose; a new protocol of Python will show up here."""
    read = {opcode.name for opcode in pickletools.opcodes if ord(opcode.code) in {*_machine._OPCODES, _machine._STOP}}
    assert read | REFUSED == {opcode.name for opcode in pickletools.opcodes}
    assert not read & REFUSED


def test_torch_has_not_changed():
    """The reader uses one table of private code in torch: its names.

    If this fails, torch has changed: read the differences from torch 2.13, above all new names in that table.
    """
    from torch import _weights_only_unpickler as weights_only

    allowed = weights_only._get_allowed_globals()
    constants = {
        name
        for name, value in allowed.items()
        if isinstance(value, (torch.dtype, torch.serialization.StorageType, torch.qscheme))
        or (isinstance(value, type) and issubclass(value, (torch.Tensor, torch.UntypedStorage, TypedStorage)))
        or value in torch._tensor_classes
    }
    # Of use only with classes that are not allowed.
    assert allowed.keys() - constants - unpickler._REBUILDS.keys() - unpickler._FUNCTIONS.keys() == {
        "torch._utils._rebuild_wrapper_subclass"
    }


def test_what_others_allow_is_not_ours(path):
    """Classes that the user's program allows torch to load are neither called here, nor does reading allow any."""
    calls = []

    class Callee:
        __module__ = "elsewhere"

        def __new__(cls, *_):
            calls.append(cls)
            return object.__new__(cls)

    Callee.__qualname__ = Callee.__name__ = "Callee"
    with torch.serialization.safe_globals([Callee]):
        before = torch.serialization.get_safe_globals()
        found = unpickle(b"\x80\x02celsewhere\nCallee\n)R.", path)
        assert torch.serialization.get_safe_globals() == before
    assert repr(found) == "<elsewhere.Callee, not loaded>"
    assert not calls


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_opcodes(path, name):
    """They are an error, whatever follows them."""
    code = next(opcode.code for opcode in pickletools.opcodes if opcode.name == name)
    with pytest.raises(PyTorchCheckpointError):
        unpickle(b"]" + code.encode("latin-1") + b"\0" * 8 + b"\n.", path)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "0 are left"),
        (b"]", "0 are left"),
        (b".", "too few values"),
        (b"]].", "not finished"),
        (b"(].", "not finished"),
        (b"0.", "no checkpoint needs"),
        (b"a.", "too few values"),
        (b"]a.", "too few values"),
        (b"Na.", "too few values"),
        (b"NNa.", "items for a NoneType"),
        (b"N(NNe.", "items for a NoneType"),
        (b"]NNs.", "items for a list"),
        (b"}(Nu.", "a key without a value"),
        (b"](N\x90.", "items for a list"),
        (b"t.", "too few values"),
        (b"1.", "no checkpoint needs"),
        (b"h\x01.", "never given"),
        (b"g1\n.", "never given"),
        (b"gx\n.", "invalid pickle"),
        (b"Npx\n.", "invalid pickle"),
        (b"q\x00.", "too few values"),
        (b"\xffN.", "invalid pickle"),
        (b"N)R.", "call of NoneType"),
        (b"cos\nsystem\n.", r"names os\.system"),
        (b"ccollections\nOrderedDict\nNR.", "without a tuple"),
        (b"ccollections\nOrderedDict\n)N\x92.", "no checkpoint needs"),
        (b"ccollections\nOrderedDict\n)}\x92.", "no checkpoint needs"),
        (b"N)\x81.", "call of NoneType"),
        (b"ctorch\nfloat32\n)R.", "call of dtype"),
        (b"ctorch\nTensor\n)R.", "call of _TensorMeta"),
        (b"ctorch\nFloatTensor\n\x8a\x06\0\0\0\0\0\1\x85R.", "call of tensortype"),
        (b"NNb.", "state for a NoneType"),
        (b"]Nb.", "state for a list"),
        (b"NQ.", "no storages here"),
        (b"NN\x93.", "name is not text"),
        (b"\x93.", "too few values"),
        (b"Ix\n.", "invalid pickle"),
        (b"L\n.", "invalid pickle"),
        (b"L" + b"9" * 1300 + b"\n.", "integer of 4319 bits"),
        (b"L" + b"9" * 5000 + b"\n.", "line of more than"),
        (b"Fx\n.", "invalid pickle"),
        (b"V\\u\n.", "invalid pickle"),
        (b"X\x02\0\0\0\xff\xfe.", "invalid pickle"),
        (b"\x8b\xff\xff\xff\xff.", "invalid pickle"),
        (b"\x8b\xff\xff\xff\x7f.", "an integer of 17179869176 bits"),
        (b"B\xff\xff\xff\xff.", "asks for 4294967295 bytes"),
        (b"](]\x91.", "a list as a key"),
        (b"}])s.", "a list as a key"),
        (b"}(]tNs.", "a tuple as a key"),
        (b"}(" + 9 * b"N" + b"tNs.", "a tuple as a key"),
        (b"}\x8a\x08\0\0\0\0\0\0\0\x10Ns.", "a int as a key"),
    ],
)
def test_malformed(path, data, what):
    """Each rule of the machine, broken once; the error has the name of the file."""
    with pytest.raises(PyTorchCheckpointError, match=what) as caught:
        unpickle(data, path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("opcode", [b"X", b"B", b"\x8d", b"\x8e", b"\x96", b"T"])
@pytest.mark.parametrize("length", [1, 100, 0x7FFFFFFF])
def test_lengths_are_checked_before_memory_is_taken(path, opcode, length, rss_anon):
    """A string longer than the file is an error that costs nothing."""
    width = 4 if opcode in (b"X", b"B", b"T") else 8
    before = rss_anon()
    with pytest.raises(PyTorchCheckpointError, match=f"asks for {length} bytes"):
        unpickle(opcode + length.to_bytes(width, "little"), path)
    assert rss_anon() - before < 8 << 20


def test_recursive_values(path):
    """Lists, dicts and tuples that contain themselves are read unchanged; a caller who walks them must be careful."""
    value: list[object] = []
    value.append(({"self": value},))
    for protocol in range(1, 6):
        found = unpickle(pickle.dumps(value, protocol), path)
        assert found[0][0]["self"] is found


def test_long_strings_and_lines_across_reads(path):
    """Data that is longer than the read-ahead buffer, or crosses its end, is read completely."""
    value = ["a" * 70_000, b"b" * 200_000, *range(60_000), "c" * 65_536]
    for protocol in (2, 4, 5):
        assert unpickle(pickle.dumps(value, protocol), path) == value


@pytest.mark.parametrize(
    "call",
    [
        files.Named("collections", "OrderedDict")([("a", 1, 2)]),
        files.Named("collections", "OrderedDict")("ab"),
        files.Named("collections", "OrderedDict")([(("a",), 1)]),
        files.Named("collections", "Counter")(5),
        files.Named("builtins", "set")("abc"),
        files.Named("builtins", "set")([[]]),
        files.Named("builtins", "set")([1], [2]),
        files.Named("builtins", "frozenset")({}),
        files.Named("builtins", "complex")("1", "2"),
        files.Named("builtins", "bytearray")(1 << 40),
        files.Named("builtins", "bytes")(1 << 40),
        files.Named("builtins", "dict")("abc"),
        files.Named("_codecs", "encode")("a", "rot13"),
        files.Named("_codecs", "encode")("日"),
        files.Named("_codecs", "encode")(b"a"),
        files.Named("torch", "Size")(5),
        files.Named("torch", "Size")(["a"]),
        files.Named("torch", "device")(["cpu"]),
        files.Named("torch", "device")("cpu", "0"),
        files.Named("torch", "Tensor")(5),
        files.Named("torch", "FloatTensor")(1 << 40),
        files.Named("torch.nn.parameter", "Parameter")([1]),
        files.Named("torch.serialization", "_get_layout")(5),
        files.Named("torch._utils", "_rebuild_tensor_v2")(1, 2, 3, 4, 5, 6),
        files.Named("torch._utils", "_rebuild_tensor_v2")(),
        files.Named("torch._utils", "_rebuild_parameter")("data", True, {}),
        files.Named("torch._utils", "_rebuild_qtensor")(1, 2, 3),
        files.Named("torch._utils", "_rebuild_sparse_tensor")("torch.sparse_coo", (1, 2)),
        files.Named("torch._utils", "_rebuild_sparse_tensor")("torch.sparse_coo", (1, 2, (3,))),
        files.Named("torch._utils", "_rebuild_sparse_tensor")(["torch.sparse_coo"], (1, 2, (3,))),
        files.Named("torch._utils", "_rebuild_nested_tensor")("torch", 2, 3, 4),
        files.Named("torch._utils", "_rebuild_meta_tensor_no_storage")("float32", (2,), (1,), False),
        files.Named("torch._utils", "_rebuild_device_tensor_from_numpy")([1.0], 2, "cuda", False),
        files.Named("torch._tensor", "_rebuild_from_type_v2")(files.Named("builtins", "bytearray"), 2, (9,), {}),
        files.Named("torch._tensor", "_rebuild_from_type_v2")(5, 2, (9,), {}),
    ],
    ids=lambda call: f"{call.function.name}-{str(call.arguments)[:30]}",
)
def test_calls_that_make_no_sense(path, call):
    """Allowed callables accept only the arguments that torch, Python and NumPy write for them."""
    with pytest.raises(PyTorchCheckpointError):
        unpickle(files.hand_pickle(call), path)


def test_threads_do_not_share_anything(tmp_path):
    """Files that are opened at once, some with classes that torch does not allow, do not allow them to one another."""
    plain, foreign = tmp_path / "plain.pt", tmp_path / "foreign.pt"
    torch.save({str(n): torch.full((2,), n) for n in range(50)}, plain)
    files.write_zip(foreign, files.hand_pickle({str(n): files.Named("other", f"Class{n}")() for n in range(200)}))

    def read(turn: int) -> bool:
        if turn % 3 == 0:
            return torch.equal(open_pytorch(plain)["7"].materialize(), torch.full((2,), 7))
        if turn % 3 == 1:
            return repr(open_pytorch(foreign).extras["9"]) == "<other.Class9, not loaded>"
        try:
            torch.load(foreign, weights_only=True)
        except pickle.UnpicklingError:
            return True
        return False

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(read, range(90)))
