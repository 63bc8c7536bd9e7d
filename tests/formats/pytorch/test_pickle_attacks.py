# SPDX-License-Identifier: Apache-2.0
"""Attack files: pickles that call out, and pickles of a few bytes that would take all memory or all time."""

from __future__ import annotations

import gc
import os
import pickle
import random
import struct
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from nvflare_lazy.errors import ForbiddenGlobalError, PyTorchCheckpointError
from nvflare_lazy.formats.pytorch import _stream as pickle_stream
from nvflare_lazy.formats.pytorch import open_pytorch
from tests.formats.pytorch import files

MIB = 1 << 20
SECONDS = 20
PROGRAMS = 2000 if os.environ.get("HYPOTHESIS_PROFILE") == "night" else 12


@pytest.fixture
def canary(tmp_path):
    return tmp_path / "canary"


def containers(tmp_path, pickled: bytes) -> list:
    """The same pickle as the contents of every kind of file, and in each earlier pickle of a file."""
    paths = [tmp_path / name for name in ("zip", "legacy", "tar", "magic", "machine", "keys", "tables")]
    files.write_zip(paths[0], pickled)
    files.write_legacy(paths[1], pickled)
    files.save_tar({}, paths[2])
    members = {"sys_info": b"", "storages": pickle.dumps(0, 2) + pickle.dumps([], 2), "tensors": pickle.dumps(0, 2)}
    files.write_tar(paths[2], members | {"pickle": pickled})
    magic = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)
    # An attack has to come before the end of the first pickle, and leave the magic number in place.
    files.write_legacy(paths[3], pickle.dumps({}, 2), magic=magic[:-1] + pickled)
    files.write_legacy(paths[4], pickle.dumps({}, 2), machine=pickled)
    files.write_legacy(paths[5], pickle.dumps({}, 2), keys=pickled)
    files.write_tar(paths[6], members | {"storages": pickled, "pickle": pickle.dumps({}, 2)})
    return paths


CALLS = {
    "os.system": lambda mark: files.Named("os", "system")(f"touch {mark}"),
    "posix.system": lambda mark: files.Named("posix", "system")(f"touch {mark}"),
    "subprocess.Popen": lambda mark: files.Named("subprocess", "Popen")(["touch", mark]),
    "builtins.eval": lambda mark: files.Named("builtins", "eval")(f"open({mark!r}, 'w')"),
    "__builtin__.eval": lambda mark: files.Named("__builtin__", "eval")(f"open({mark!r}, 'w')"),
    "builtins.exec": lambda mark: files.Named("builtins", "exec")(f"open({mark!r}, 'w')"),
    "builtins.open": lambda mark: files.Named("builtins", "open")(mark, "w"),
    "builtins.getattr": lambda mark: files.Named("builtins", "getattr")(files.Named("os", "x"), "system"),
    "builtins.__import__": lambda mark: files.Named("builtins", "__import__")("antigravity"),
    "builtins.type": lambda mark: files.Named("builtins", "type")("X", (), {}),
    "builtins.map": lambda mark: files.Named("builtins", "map")(files.Named("os", "system"), [f"touch {mark}"]),
    "importlib.import_module": lambda mark: files.Named("importlib", "import_module")("antigravity"),
    "runpy.run_path": lambda mark: files.Named("runpy", "run_path")(mark),
    "functools.partial": lambda mark: files.Named("functools", "partial")(files.Named("os", "system"), f"touch {mark}"),
    "operator.attrgetter": lambda mark: files.Named("operator", "attrgetter")("__globals__"),
    "operator.methodcaller": lambda mark: files.Named("operator", "methodcaller")("system", f"touch {mark}"),
    "types.FunctionType": lambda mark: files.Named("types", "FunctionType")(b"", {}),
    "marshal.loads": lambda mark: files.Named("marshal", "loads")(b"N"),
    "pickle.loads": lambda mark: files.Named("pickle", "loads")(pickle.dumps(1)),
    "_pickle.loads": lambda mark: files.Named("_pickle", "loads")(pickle.dumps(1)),
    "copyreg._reconstructor": lambda mark: files.Named("copyreg", "_reconstructor")(1, 2, None),
    "copyreg.__newobj__": lambda mark: files.Named("copyreg", "__newobj__")(1),
    "codecs.open": lambda mark: files.Named("codecs", "open")(mark, "w"),
    "_codecs.decode": lambda mark: files.Named("_codecs", "decode")(b"", "unicode_escape"),
    "shutil.rmtree": lambda mark: files.Named("shutil", "rmtree")(mark),
    "sys.exit": lambda mark: files.Named("sys", "exit")(1),
    "ctypes.CDLL": lambda mark: files.Named("ctypes", "CDLL")("libc.so.6"),
    "numpy.load": lambda mark: files.Named("numpy", "load")(mark),
    "numpy.fromfile": lambda mark: files.Named("numpy", "fromfile")("/etc/passwd"),
    "numpy.testing._private.utils.runstring": lambda mark: files.Named("numpy.testing._private.utils", "runstring")(
        f"open({mark!r}, 'w')", {}
    ),
    "torch.load": lambda mark: files.Named("torch", "load")(mark),
    "torch.serialization.load": lambda mark: files.Named("torch.serialization", "load")(mark),
    "torch.storage._load_from_bytes": lambda mark: files.Named("torch.storage", "_load_from_bytes")(pickle.dumps(1)),
    "torch.hub.load": lambda mark: files.Named("torch.hub", "load")("evil/evil", "evil"),
    "torch.jit.load": lambda mark: files.Named("torch.jit", "load")(mark),
    "torch.jit._script.CompilationUnit": lambda mark: files.Named("torch.jit._script", "CompilationUnit")("x"),
    "torch.utils.cpp_extension.load_inline": lambda mark: files.Named("torch.utils.cpp_extension", "load_inline")(
        "x", ""
    ),
    "torch._utils._import_dotted_name": lambda mark: files.Named("torch._utils", "_import_dotted_name")("os.system"),
    "torch._utils._set_obj_state": lambda mark: files.Named("torch._utils", "_set_obj_state")(1, {}),
    "torch._inductor.codecache.PyCodeCache.load": lambda mark: files.Named(
        "torch._inductor.codecache", "PyCodeCache.load"
    )(f"open({mark!r}, 'w')"),
    "torch.utils._config_module.ConfigModule.load_config": lambda mark: files.Named(
        "torch.utils._config_module", "ConfigModule.load_config"
    )(b"x"),
    "torch.distributed.rpc.internal._run_function": lambda mark: files.Named(
        "torch.distributed.rpc.internal", "_run_function"
    )(1),
    "torch.fx.graph_module.reduce_graph_module": lambda mark: files.Named(
        "torch.fx.graph_module", "reduce_graph_module"
    )({}, ""),
    "torch.UntypedStorage.from_file": lambda mark: files.Named("torch", "UntypedStorage.from_file")(
        "/etc/passwd", False, 9
    ),
    "torch.FloatStorage.from_file": lambda mark: files.Named("torch", "FloatStorage.from_file")(
        "/etc/passwd", False, 9
    ),
    "torch._utils._rebuild_tensor.__globals__": lambda mark: files.Named("torch._utils", "_rebuild_tensor.__globals__"),
    "torch.float32.__class__": lambda mark: files.Named("torch", "float32.__class__"),
    "torch.nn.modules.linear.Linear": lambda mark: files.Named("torch.nn.modules.linear", "Linear")(2, 3),
    "torch.distributed.tensor.DTensor": lambda mark: files.Named("torch.distributed.tensor", "DTensor")(1),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_called(tmp_path, canary, name):
    """No pickle of any kind of file runs code; the error has the name of the global."""
    for path in containers(tmp_path, files.hand_pickle({"a": CALLS[name](str(canary))})):
        with pytest.raises(ForbiddenGlobalError) as caught:
            open_pytorch(path)
        message = str(caught.value)
        assert str(path) in message
        assert "No code of it was run" in message
        assert any(part in message for part in (name.replace("__builtin__", "builtins"), "os.system", "os.x"))
    assert not canary.exists()


def test_a_name_alone_is_enough(tmp_path):
    """A global that is never called is refused: a user of the result could call it."""
    files.write_zip(tmp_path / "model.pt", b"\x80\x02}X\x01\0\0\0acos\nsystem\ns.")
    with pytest.raises(ForbiddenGlobalError, match=r"os\.system"):
        open_pytorch(tmp_path / "model.pt")


def test_names_of_protocol_4_are_looked_up_in_the_same_table(tmp_path):
    """Names put together on the stack, with dots that Python would follow."""
    for module, name in (("os", "system"), ("torch", "serialization.os.system"), ("collections", "abc.sys.exit")):
        pickled = b"\x80\x04" + pickle.dumps(module, 4)[11:-2] + pickle.dumps(name, 4)[11:-2] + b"\x93."
        files.write_zip(tmp_path / "model.pt", pickled)
        with pytest.raises(ForbiddenGlobalError, match="names"):
            open_pytorch(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (("torch.nn.modules.linear", "Linear"), "whole pickled model"),
        (("torch.distributed.tensor", "DTensor"), "spread over processes"),
        (("functools", "partial"), "not part of a state dict"),
    ],
)
def test_the_message_says_what_to_do(tmp_path, name, hint):
    """Most refused files are not attacks: the error gives the reason and a remedy."""
    files.write_zip(tmp_path / "model.pt", files.hand_pickle({"a": files.Named(*name)}))
    with pytest.raises(ForbiddenGlobalError, match=hint) as caught:
        open_pytorch(tmp_path / "model.pt")
    assert "save the state dict alone" in str(caught.value)


def test_a_whole_module_is_refused(tmp_path):
    """`torch.save(model)` instead of `torch.save(model.state_dict())`."""
    for new_format in (True, False):
        torch.save(torch.nn.Linear(2, 3), tmp_path / "model.pt", _use_new_zipfile_serialization=new_format)
        with pytest.raises(ForbiddenGlobalError, match=r"torch\.nn\.modules\.linear\.Linear, so it is a whole"):
            open_pytorch(tmp_path / "model.pt")


def test_what_python_would_run_does_run_elsewhere(tmp_path, canary):
    """The attack files are real: Python's own unpickler, given one, runs it."""
    pickled = files.hand_pickle(CALLS["os.system"](str(canary)))
    assert pickle.loads(pickled) == 0
    assert canary.exists()


# ---- memory and time ---------------------------------------------------------------------------------------------


def repeated_call(module: str, name: str, argument: bytes, times: int) -> bytes:
    """One large argument, copied again and again."""
    call = f"c{module}\n{name}\n".encode()
    return b"\x80\x02](" + argument + b"q\x00" + (call + b"h\x00\x85R") * times + b"e."


def pairs(count: int) -> bytes:
    return b"](" + b"".join(b"](J" + struct.pack("<i", index) + b"Ne" for index in range(count)) + b"e"


def numbered_nones(count: int) -> bytes:
    return b"".join(b"J" + struct.pack("<i", index) + b"N" for index in range(count))


def colliding_integers(count: int) -> bytes:
    """Different integers that all have the hash 0."""
    rows = (pickle.dumps(index * ((1 << 61) - 1), 2)[2:-1] + b"N" for index in range(1, count))
    return b"}(" + b"".join(rows) + b"u"


def deep_tuple(depth: int) -> bytes:
    return b")" + b"\x85" * depth


def doubling_tuple(depth: int) -> bytes:
    """(x, x) of (x, x) of …: a few bytes whose hash, text or copy would take for ever."""
    return b")q\x00" + b"h\x00\x86q\x00" * depth


# A persistent id of a legacy file, without its storage.
FLOATS = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0000X\3\0\0\0cpuK\x04NtQ"


# A tensor of the meta device, which has no storage.
TENSOR = b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\nK\x01\x85K\x01\x85\x89tR"


def rebuilt(function: bytes, arguments: bytes) -> bytes:
    """One list of sizes, used by very many tensors."""
    sizes = b"(" + b"K\x01" * 99_999 + b"tq\x00"
    shared = sizes + FLOATS + b"q\x01X\x10\0\0\0torch.sparse_cooq\x02"
    return b"\x80\x02(" + shared + (b"ctorch._utils\n" + function + arguments) * 20_000 + b"t."


# Harmless here; Python's own unpickler allocates by these numbers, or a copy of the state would never end.
MEMOS = {
    "a memo of 4 billion places": lambda: b"\x80\x02Nr\xff\xff\xff\xff.",
    "a memo of 10 billion places": lambda: b"Np9999999999\n.",
    "a doubling tuple as a state": lambda: b"\x80\x02cargparse\nNamespace\n)R" + doubling_tuple(200) + b"b.",
    "very many places in the memo": lambda: b"\x80\x04]" + b"\x94" * 300_000 + b".",
    "a memo with many such places": lambda: (
        b"Nr" + b"r".join(struct.pack("<I", (1 << 32) - i) for i in range(1, 9999)) + b"."
    ),
}
# Lengths that are not in the file; in a legacy file, where tensors follow the pickle, most of them could be.
LENGTHS = {
    "a string of 2 GiB": lambda: b"\x80\x02X\xff\xff\xff\x7f.",
    "a string of 8 EiB": lambda: b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "bytes of 8 EiB": lambda: b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "an array of bytes of 1 TiB": lambda: b"\x80\x05\x96\0\0\0\0\0\1\0\0.",
    "a frame of 1 TiB": lambda: b"\x80\x04\x95\0\0\0\0\0\1\0\0]",
    "an integer of 2 GiB": lambda: b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "an integer of a million digits": lambda: b"L" + b"9" * 1_000_000 + b"L\n.",
    "a name without end": lambda: b"c" + b"a" * 500_000,
    "a bytearray by its length": lambda: b"cbuiltins\nbytearray\n\x8a\x06\0\0\0\0\0\1\x85R.",
}
BOMBS = {
    "very many sets": lambda: b"\x80\x04](" + b"\x8f" * 100_000 + b"e.",
    "very many dicts": lambda: b"\x80\x02](" + b"}" * 300_000 + b"e.",
    "very many lists": lambda: b"\x80\x02](" + b"]" * 300_000 + b"e.",
    "very many marks": lambda: b"\x80\x02" + b"(" * 300_000 + b".",
    "lists in lists": lambda: b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
    "tuples in tuples": lambda: b"\x80\x02" + deep_tuple(120_000) + b".",
    "dicts in dicts": lambda: b"\x80\x02" + b"}N" * 50_000 + b"}" + b"s" * 50_000 + b".",
    "a deep tuple as a key": lambda: b"\x80\x02}" + deep_tuple(120_000) + b"Ns.",
    "a deep tuple in a set": lambda: b"\x80\x04\x8f(" + deep_tuple(120_000) + b"\x90.",
    "a doubling tuple as a key": lambda: b"\x80\x02}" + doubling_tuple(200) + b"Ns.",
    "a doubling tuple in a frozenset": lambda: b"\x80\x04(" + doubling_tuple(200) + b"\x91.",
    "a doubling tuple as a shape": lambda: b"\x80\x02ctorch\nSize\n" + doubling_tuple(200) + b"\x85R.",
    "a doubling tuple as a persistent id": lambda: b"\x80\x02" + doubling_tuple(200) + b"Q.",
    "a doubling tuple called": lambda: b"\x80\x02" + doubling_tuple(200) + b")R.",
    "a doubling tuple as an extra": lambda: b"\x80\x02" + doubling_tuple(200) + b".",
    "doubling lists": lambda: b"\x80\x02(]q\x00" + b"](h\x00h\x00eq\x00" * 200 + b"t.",
    "doubling dicts": lambda: b"\x80\x02(}q\x00" + b"}(U\x01ah\x00U\x01bh\x00uq\x00" * 200 + b"t.",
    "long names in a deep dict": lambda: (
        b"(X\0\0\x10\0" + b"x" * MIB + b"q\x01}q\x02" + b"}h\x01h\x02sq\x02" * 60 + b"t."
    ),
    "integers that collide": lambda: b"\x80\x02" + colliding_integers(100_000) + b".",
    "a list copied into dicts": lambda: repeated_call("collections", "OrderedDict", pairs(20_000), 20_000),
    "a list copied into sets": lambda: repeated_call("builtins", "set", b"(" + b"K\x01" * 99_999 + b"l", 20_000),
    "bytes copied into arrays": lambda: repeated_call("builtins", "bytearray", b"X\0\0\x10\0" + b"x" * MIB, 20_000),
    "text copied into bytes": lambda: repeated_call("_codecs", "encode", b"X\0\0\x10\0" + b"x" * MIB, 20_000),
    "a shape copied into tensors": lambda: repeated_call("torch", "Size", b"(" + b"K\x01" * 99_999 + b"t", 20_000),
    "sizes copied into tensors": lambda: rebuilt(b"_rebuild_tensor\n", b"(h\x01K\x00h\x00h\x00tR"),
    "sizes copied into sparse tensors": lambda: rebuilt(b"_rebuild_sparse_tensor\n", b"(h\x02(NNh\x00ttR"),
    "sizes copied into tensors with attributes": lambda: (
        b"\x80\x02(" + b"(" + b"K\x01" * 99_999 + b"tq\x00" + FLOATS + b"q\x01ctorch._utils\n_rebuild_tensor\nq\x02"
        b"ctorch\nFloatTensor\nq\x03"
        + b"ctorch._tensor\n_rebuild_from_type_v2\n(h\x02h\x03(h\x01K\x00h\x00h\x00tNtR" * 20_000
        + b"t."
    ),
    "long names, again and again": lambda: (
        b"\x80\x04(X\0\0\x10\0" + b"x" * MIB + b"\x94X\x01\0\0\0x\x94" + b"h\x00h\x01\x93" * 20_000 + b"t."
    ),
    "a set made again and again": lambda: repeated_call(
        "builtins", "set", b"(" + b"".join(b"J" + struct.pack("<i", i) for i in range(20_000)) + b"t", 20_000
    ),
    "a storage again and again": lambda: b"\x80\x02(" + FLOATS + b"q\x01" + FLOATS * 60_000 + b"t.",
    "one tensor, again and again": lambda: b"\x80\x02](" + TENSOR + b"q\x01" + b"h\x01" * 500_000 + b"e.",
    "one tensor rebuilt again and again": lambda: (
        b"\x80\x02](ctorch._utils\n_rebuild_parameter\nq\x01"
        + TENSOR
        + b"\x88}\x87q\x02"
        + b"h\x01h\x02R" * 100_000
        + b"e."
    ),
    "very many small numbers": lambda: b"\x80\x02](" + b"K\x01" * 500_000 + b"e.",
    "very many tuples of one": lambda: b"\x80\x02](" + b"N\x85" * 500_000 + b"e.",
    "very many objects": lambda: b"\x80\x02](ca.b\nq\x01)q\x02" + b"h\x01h\x02R" * 200_000 + b"e.",
    "attributes copied into objects": lambda: (
        b"(}(" + numbered_nones(20_000) + b"uq\x00" + b"cargparse\nNamespace\n)Rh\x00b" * 20_000 + b"t."
    ),
}


def peak_memory() -> int:
    """The most memory this process has had since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak() -> int:
    """Start a new measurement of the peak; return the current value."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, kind) for name in LENGTHS for kind in ("zip", "legacy")), *((name, "zip") for name in BOMBS)],
)
def test_bombs(tmp_path, monkeypatch, name, kind):
    """None takes more than a moment, or more memory than is granted to the objects of any pickle of its size."""
    # With a smaller initial limit, smaller and quicker bombs show the same.
    monkeypatch.setattr(pickle_stream, "_FREE_BYTES", 8 * MIB)
    write = files.write_zip if kind == "zip" else files.write_legacy
    bomb = (BOMBS | LENGTHS)[name]()
    write(tmp_path / "model.pt", bomb)
    before, start = forget_peak(), time.process_time()
    with pytest.raises(PyTorchCheckpointError):
        open_pytorch(tmp_path / "model.pt")
    assert time.process_time() - start < SECONDS
    assert peak_memory() - before < pickle_stream._BYTES_PER_BYTE * len(bomb) + 24 * MIB


def random_pickle(rng: random.Random, nbytes: int) -> bytes:
    """A valid pickle: a list of many values, most of which are made of values before them."""
    parts, size, count = [b"\x80\x04]("], 0, 0

    def known() -> bytes:
        return b"j" + struct.pack("<I", rng.randrange(count)) if count else b"N"

    def several(end: bytes) -> bytes:
        return b"(" + b"".join(known() for _ in range(rng.choice((0, 1, 2, 64, 500)))) + end

    sizes = b"(" + b"K\x01" * 64 + b"t"
    makers = (
        lambda: rng.choice((b"N", b"\x88", b")", b"]", b"}", b"\x8f", b"K\x07", b"\x8c\x02ab", b"G" + bytes(8))),
        lambda: b"X" + struct.pack("<I", length := rng.choice((0, 9, 5000))) + b"x" * length,
        known,
        lambda: known() + b"\x85",
        lambda: known() + known() + b"\x86",
        lambda: several(b"t"),
        lambda: several(b"l"),
        lambda: b"}(" + b"".join(b"K" + bytes((key,)) + known() for key in range(9)) + b"u",
        lambda: b"](" + several(b"t") + b"e",
        lambda: TENSOR,
        lambda: b"ctorch._utils\n_rebuild_parameter\n" + known() + b"\x88}\x87R",
        lambda: b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\n" + sizes + b"]\x89tR",
        lambda: b"ccollections\nOrderedDict\n)R",
        lambda: b"ccollections\nOrderedDict\n" + known() + b"\x85R",
        lambda: b"ctorch\nSize\n" + sizes + b"\x85R",
        lambda: b"cargparse\nNamespace\n)R" + known() + b"b",
        lambda: b"ca.b\n" + known() + b"\x85R",
        lambda: b"cbuiltins\nset\n" + several(b"l") + b"\x85R",
    )
    while size < nbytes:
        part = rng.choice(makers)()
        part = part * rng.choice((1, 1, 1, 300)) if len(part) < 100 else part
        if rng.random() < 0.5:
            part, count = part + b"\x94", count + 1
        parts.append(part)
        size += len(part)
    return b"".join(parts) + b"e."


@pytest.mark.parametrize("seed", range(4))
def test_random_programs(tmp_path, monkeypatch, seed):
    """Memory and work stay within the limit for a pickle of this size, whatever its values share."""
    free, rng, opened = 1 * MIB, random.Random(seed), 0
    monkeypatch.setattr(pickle_stream, "_FREE_BYTES", free)
    spend, work = pickle_stream.PickleStream.spend, [0, 0, 0]

    def counted(stream, nbytes):
        work[:] = work[0] + 1, work[1] + work[2], nbytes
        spend(stream, nbytes)

    monkeypatch.setattr(pickle_stream.PickleStream, "spend", counted)
    for _ in range(PROGRAMS):
        data = random_pickle(rng, rng.choice((200, 2000, 20_000)))
        files.write_zip(tmp_path / "model.pt", data)
        work[:] = 0, 0, 0
        tracemalloc.start()
        try:
            opened += bool(open_pytorch(tmp_path / "model.pt"))
        except PyTorchCheckpointError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        granted = free + pickle_stream._BYTES_PER_BYTE * len(data)
        assert peak < granted + 256 * 1024
        assert work[1] <= granted
        assert work[0] < granted / 16 + len(data)
    assert opened


@pytest.mark.parametrize("name", MEMOS)
def test_memos(tmp_path, name):
    """Memo entries cost the size of their values, whatever their number."""
    files.write_zip(tmp_path / "model.pt", MEMOS[name]())
    before = forget_peak()
    with suppress(PyTorchCheckpointError):
        open_pytorch(tmp_path / "model.pt")
    assert peak_memory() - before < 16 * MIB


def test_the_limit_as_it_is(tmp_path):
    """Two million sets in two megabytes would be half a gigabyte: refused after the weight that is free."""
    files.write_zip(tmp_path / "model.pt", b"\x80\x04](" + b"\x8f" * 2_000_000 + b"e.")
    before = forget_peak()
    with pytest.raises(PyTorchCheckpointError, match="far more memory"):
        open_pytorch(tmp_path / "model.pt")
    assert peak_memory() - before < 128 * MIB


def test_what_is_opened_in_spite_of_its_look(tmp_path):
    """The limits are not near: a hundred thousand dicts in a list are an honest, if odd, checkpoint."""
    torch.save([{"step": index} for index in range(100_000)], tmp_path / "model.pt")
    assert open_pytorch(tmp_path / "model.pt").extras["99999"] == {"step": 99_999}


@pytest.mark.parametrize("protocol", [2, 4])
def test_real_checkpoints_stay_well_below_the_limit(tmp_path, monkeypatch, protocol):
    """Pickles that contain only small tensors, an optimizer's included, stay within the fixed allowance."""
    monkeypatch.setattr(pickle_stream, "_FREE_BYTES", 0)
    state = {i: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2, 2), "square": torch.ones(2)} for i in range(300)}
    model = {f"layers.{i}.weight": torch.nn.Parameter(torch.zeros(2, 2)) for i in range(500)}
    views = {str(i): model["layers.0.weight"].detach()[1:] for i in range(500)}
    for content in (state, model, views):
        torch.save(content, tmp_path / "model.pt", pickle_protocol=protocol)
        assert len(open_pytorch(tmp_path / "model.pt")) >= 500


def test_a_malformed_pickle_is_not_printed(tmp_path):
    """An error about a value of a million million parts has a short message."""
    files.write_zip(tmp_path / "model.pt", b"\x80\x02}" + doubling_tuple(200) + b"Ns.")
    with pytest.raises(PyTorchCheckpointError) as caught:
        open_pytorch(tmp_path / "model.pt")
    assert len(str(caught.value)) < 500
