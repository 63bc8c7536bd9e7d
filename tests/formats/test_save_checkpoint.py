# SPDX-License-Identifier: Apache-2.0
"""What `save` and `save_safetensors_streaming` write: the library's bytes, from anything that is a tensor."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import nvflare_lazy
from benchmarks.measuring import PeakMemory
from nvflare_lazy.errors import (
    MetadataMismatchError,
    SafetensorsError,
    SaveError,
    UnserializableTensorError,
    UnsupportedDtypeError,
)
from nvflare_lazy.formats import (
    DTYPE_ELEMENT_SIZE,
    DTYPE_TO_SAFETENSORS,
    StateDictMetaItem,
    TensorMeta,
    collect_state_dict_meta,
    open_safetensors,
    save,
    save_safetensors_streaming,
)
from nvflare_lazy.formats.safetensors.header import encode_header
from nvflare_lazy.formats.safetensors.layout import split_into_shards
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.dtypes import ELEMENT_TYPES
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor

GOLDEN = bytes.fromhex("d8000000 00000000") + (
    b'{"__metadata__":{"a":"\xc3\xa4\\n","b":"2","format":"pt"},'
    b'"wide":{"dtype":"I64","shape":[],"data_offsets":[0,8]},'
    b'"a":{"dtype":"F32","shape":[1,2],"data_offsets":[8,16]},'
    b'"b":{"dtype":"U8","shape":[3],"data_offsets":[16,19]}}'
    b"\xfe\xff\xff\xff\xff\xff\xff\xff"
    b"\x00\x00\x80\x3f\x00\x00\x00\xc0"
    b"\x01\x02\x03"
)


def one_of_each() -> dict[str, torch.Tensor]:
    """A tensor of each type, named so that the order of types is not that of names."""
    return {
        f"{index:02d}.{row.name}": (torch.arange(16, dtype=torch.uint8) % (2 if row.torch == torch.bool else 255))
        .view(row.torch)
        .reshape(1, -1)
        for index, row in enumerate(ELEMENT_TYPES)
        if row.name and row.torch
    }


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def files(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_a_big_endian_array_keeps_its_values(tmp_path: Path) -> None:
    """A file has one byte order, whichever an array comes in, lazy or not."""
    values = np.array([1.0, 2.0, 3.0], ">f4")
    save({"lazy": LazyArray(MemorySource(values.tobytes()), ">f4", (3,)), "ordinary": values}, tmp_path / "m")
    loaded = load_file(tmp_path / "m")
    assert loaded["lazy"].tolist() == loaded["ordinary"].tolist() == [1.0, 2.0, 3.0]


def test_golden_bytes(tmp_path: Path) -> None:
    """The bytes of a file never change: wide types first, then names, the data aligned to eight."""
    tensors = {
        "b": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "a": torch.tensor([[1.0, -2.0]]),
        "wide": torch.tensor(-2),
    }
    save(tensors, tmp_path / "m", metadata={"b": "2", "a": "ä\n"})
    assert (tmp_path / "m").read_bytes() == GOLDEN


def test_same_bytes_as_the_library(tmp_path: Path) -> None:
    """A file is byte for byte what the safetensors library writes, for every type that both have."""
    for number, given in enumerate((None, {"format": 'ü "\\\x01\x7f\u2028'})):
        save_file(one_of_each(), tmp_path / f"theirs-{number}", metadata=given or {"format": "pt"})
        save(one_of_each(), tmp_path / f"ours-{number}", metadata=given)
        assert (tmp_path / f"ours-{number}").read_bytes() == (tmp_path / f"theirs-{number}").read_bytes()


def test_order_of_arrival_does_not_matter(tmp_path: Path) -> None:
    """The same tensors and metadata make the same bytes in any order."""
    tensors, metadata = one_of_each(), {"x": "1", "y": "2", "z": "3"}
    save(tensors, tmp_path / "one", metadata=metadata)
    save(dict(reversed(tensors.items())), tmp_path / "two", metadata=dict(reversed(metadata.items())))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_anything_that_is_a_tensor(tmp_path: Path) -> None:
    """Lazy, strided, shared, gradient-tracking, NumPy and byte-swapped values are saved as the elements they show."""
    base = torch.randn(40, 50)
    array = np.arange(60, dtype=np.int32).reshape(3, 4, 5)
    save({"stored": base}, tmp_path / "stored")
    lazy = open_safetensors(tmp_path / "stored")["stored"]
    tensors: dict[str, Any] = {
        "transposed": base.T,
        "sliced": base[::2, 3:30:3],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "permuted": torch.randn(2, 3, 4, 5).permute(3, 0, 2, 1),
        "offset": base[7],
        "parameter": torch.nn.Parameter(base[:2]),
        "gradient": (base.clone().requires_grad_() * 2)[0],
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
        "scalar": torch.tensor(3, dtype=torch.int8),
        "empty": torch.empty(0, 7),
        "lazy": lazy,
        "lazy view": lazy.T[3:, ::2],
        "lazy in memory": LazyTensor.from_tensor(base.T),
        "tied": base,
        "tied too": base,
        "np": array,
        "np.fortran": np.asfortranarray(array),
        "np.reversed": array[::-1, :, ::-2],
        "np.big": array.astype(">i4"),
        "np.big view": array.astype(">i4")[1, ::2],
        "np.scalar": np.float64(2.5) * np.ones(()),
        "np.bool": np.array([True, False]),
        "np.read-only": np.frombuffer(b"abc", dtype=np.uint8),
        "np.lazy": LazyArray.from_lazy_tensor(lazy),
    }
    save(tensors, tmp_path / "m")
    loaded = load_file(tmp_path / "m")
    assert loaded.keys() == tensors.keys()
    for name, value in tensors.items():
        if isinstance(value, LazyTensor):
            expected = value.materialize()
        elif isinstance(value, torch.Tensor):
            expected = value.detach().resolve_conj().resolve_neg()
        else:
            native = np.array(value, np.asarray(value).dtype.newbyteorder("="), order="C")
            expected = torch.from_numpy(native)
        assert loaded[name].dtype == expected.dtype, name
        assert torch.equal(loaded[name], expected), name


def test_pairs_of_four_bits(tmp_path: Path) -> None:
    """The shape of 4-bit floats is counted in elements in the file, and in pairs in torch."""
    pairs = torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(torch.float4_e2m1fn_x2)
    save({"x": pairs}, tmp_path / "m")
    assert b'"dtype":"F4","shape":[2,6]' in (tmp_path / "m").read_bytes()
    assert bits(open_safetensors(tmp_path / "m")["x"].materialize()) == bits(pairs)
    with pytest.raises(UnserializableTensorError, match="'x' is a single"):
        save({"x": pairs[0, 0]}, tmp_path / "m")


def test_checkpoint_to_checkpoint(tmp_path: Path) -> None:
    """A lazy dictionary is saved with its metadata, unless there is other metadata; the format is always there."""
    save(one_of_each(), tmp_path / "one", metadata={"format": "mlx", "k": "v"})
    lazy = nvflare_lazy.open(tmp_path / "one")
    save(lazy, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    save(lazy, tmp_path / "two", metadata={})
    assert open_safetensors(tmp_path / "two").metadata == {"format": "pt"}


def test_saving_over_what_is_being_read(tmp_path: Path) -> None:
    """A checkpoint can be saved over itself, cast on the way."""
    save({"a": torch.arange(10.0), "n": torch.tensor(7)}, tmp_path / "m")
    save(nvflare_lazy.open(tmp_path / "m"), tmp_path / "m", dtype=torch.bfloat16)
    loaded = load_file(tmp_path / "m")
    assert loaded["a"].dtype == torch.bfloat16
    assert loaded["a"].tolist() == list(range(10))
    assert loaded["n"].dtype == torch.int64


@pytest.mark.parametrize("size", [1, 1000, (1 << 20) // 4 + 1, 3 * (1 << 20)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float8_e4m3fn], ids=str)
def test_casting(tmp_path: Path, dtype: torch.dtype, size: int) -> None:
    """Casting while saving gives the bits of a cast by torch, even over the edges of tiles."""
    tensor = torch.randn(size)
    save({"lazy": LazyTensor.from_tensor(tensor), "np": tensor.numpy(), "memory": tensor}, tmp_path / "m", dtype=dtype)
    for loaded in load_file(tmp_path / "m").values():
        assert bits(loaded) == bits(tensor.to(dtype))


def test_progress_and_result(tmp_path: Path) -> None:
    """Progress adds up to the bytes of the tensors, and the returned path can be opened."""
    save({"a": torch.zeros(3 << 20), "b": torch.zeros(5)}, tmp_path / "m.safetensors")
    seen: list[int] = []
    path = save(nvflare_lazy.open(tmp_path / "m.safetensors"), tmp_path, progress=seen.append)
    assert path == tmp_path / "model.safetensors"
    assert sum(seen) == (12 << 20) + 20
    assert len(seen) > 6
    assert nvflare_lazy.open(path).nbytes == sum(seen)


@pytest.mark.parametrize("how", ["as it is", "cast", "transposed", "in a stream", "sharded"])
def test_memory_of_a_save(tmp_path: Path, how: str) -> None:
    """A save takes the memory of a few tiles, however large a lazy tensor is and whatever conversion it needs."""
    save({name: torch.zeros(4096, 4096) for name in ("warm", "up")}, tmp_path / "source.safetensors")
    tensors = nvflare_lazy.open(tmp_path / "source.safetensors")
    options: dict[str, Any] = {"cast": {"dtype": torch.float64}, "sharded": {"max_shard_size": "64MiB"}}.get(how, {})

    def run() -> None:
        if how == "in a stream":
            meta = collect_state_dict_meta(tensors.items())
            save_safetensors_streaming(tensors.items(), tmp_path / "m.safetensors", meta)
        elif how == "transposed":
            save({name: tensor.T for name, tensor in tensors.items()}, tmp_path / "m.safetensors")
        else:
            save(tensors, tmp_path / "m.safetensors", **options)

    run()
    with PeakMemory() as memory:
        run()
    assert memory.growth < (32 if how == "transposed" else 8) << 20
    assert nvflare_lazy.open(tmp_path / "m.safetensors").nbytes == (128 << 20) * (2 if how == "cast" else 1)


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


@pytest.mark.parametrize(
    ("tensors", "options", "error", "message"),
    [
        ({"x": sparse()}, {}, UnserializableTensorError, "'x' cannot be saved: a sparse"),
        ({"x": torch.empty(3, device="meta")}, {}, UnserializableTensorError, "meta tensor"),
        ({"x": [1.0]}, {}, UnserializableTensorError, "'x' cannot be saved: a list is neither a tensor nor an array"),
        ({"x": 1.0}, {}, UnserializableTensorError, "'x' cannot be saved: a float"),
        ({"x": torch.ones(2, dtype=torch.complex128)}, {}, UnsupportedDtypeError, "'x' is torch.complex128"),
        ({"x": np.array(["a"])}, {}, UnsupportedDtypeError, "'x'"),
        ({"x": np.array([None])}, {}, UnsupportedDtypeError, "'x'"),
        ({"x": torch.ones(2)}, {"dtype": torch.int32}, UnsupportedDtypeError, "float"),
        ({"x": torch.ones(1)}, {"metadata": {"a": 1}}, SafetensorsError, "'a' has a int"),
        ({"\ud800": torch.ones(1)}, {}, UnserializableTensorError, "cannot be written"),
        ({"__metadata__": torch.ones(1)}, {}, MetadataMismatchError, "metadata's own name"),
        ({"x": torch.ones([1] * 65)}, {}, SafetensorsError, "at most 64 numbers"),
        ({"x": torch.ones(2)}, {"max_shard_size": "a lot"}, ValueError, "invalid size"),
        ({str(n): torch.ones(1) for n in range(600)}, {"max_shard_size": 4}, SaveError, "600 shards"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, tensors, options, error, message) -> None:
    """The error for an unsupported value, such as a sparse tensor, names it, and no file is written."""
    (tmp_path / "m.safetensors").write_bytes(b"old")
    with pytest.raises(error, match=message):
        save(tensors, tmp_path / "m.safetensors", **options)
    assert files(tmp_path) == ["m.safetensors"]
    assert (tmp_path / "m.safetensors").read_bytes() == b"old"


# ---- sharded ---------------------------------------------------------------------------------------------------


def test_sharded(tmp_path: Path) -> None:
    """A checkpoint that is larger than allowed becomes shards of at most that, an index, and the same tensors."""
    tensors = {f"layer.{index}": torch.full((100,), float(index)) for index in range(10)} | {"big": torch.zeros(1000)}
    index = save(tensors, tmp_path / "m.safetensors", max_shard_size=1200, metadata={"k": "v"})
    assert index == tmp_path / "m.safetensors.index.json"
    written = json.loads(index.read_text())
    assert written["metadata"] == {"total_parameters": 2000, "total_size": 8000}
    assert files(tmp_path) == [*(f"m-{n:05d}-of-00005.safetensors" for n in range(1, 6)), "m.safetensors.index.json"]
    assert sorted(set(written["weight_map"].values())) == files(tmp_path)[:-1]
    for shard in files(tmp_path)[:-1]:
        loaded = load_file(tmp_path / shard)
        assert {name for name, of in written["weight_map"].items() if of == shard} == loaded.keys()
        assert sum(tensor.nbytes for tensor in loaded.values()) <= 1200 or list(loaded) == ["big"]
    opened = nvflare_lazy.open(tmp_path)
    assert opened.metadata == {"format": "pt", "k": "v"}
    assert {name: tensor.tolist() for name, tensor in opened.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


def test_small_enough_is_not_sharded(tmp_path: Path) -> None:
    """What fits into one shard is one file, without an index."""
    save({"a": torch.zeros(10)}, tmp_path / "m.safetensors", max_shard_size="1KiB")
    save({"huge": torch.zeros(1000)}, tmp_path / "n.safetensors", max_shard_size="1KiB")
    assert files(tmp_path) == ["m.safetensors", "n.safetensors"]


def test_shards_are_the_same_in_any_order(tmp_path: Path) -> None:
    """The same tensors make the same shards and the same index, whatever the order of the dictionary."""
    tensors = one_of_each()
    for name, given in (("one", tensors), ("two", dict(reversed(tensors.items())))):
        (tmp_path / name).mkdir()
        save(given, tmp_path / name, max_shard_size=48)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    for name in files(tmp_path / "one"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_splitting_into_shards() -> None:
    """Shards are filled in the order of the file. A tensor above the limit has its own shard, and no shard is empty."""
    sizes = {"a": 3, "b": 3, "c": 5, "d": 20, "e": 0, "f": 9, "g": 2}
    shards = split_into_shards([TensorMeta(name, "U8", (size,)) for name, size in sizes.items()], 10)
    assert [[meta.name for meta in shard] for shard in shards] == [["a", "b"], ["c"], ["d"], ["e", "f"], ["g"]]
    assert split_into_shards([], 10) == [[]]


# ---- in a stream, to a promise ---------------------------------------------------------------------------------

META = [TensorMeta("b", "F32", [2, 2]), TensorMeta("a", "I64", [3])]
STREAM = [("b", torch.ones(2, 2)), ("a", torch.arange(3))]


def test_streaming(tmp_path: Path) -> None:
    """Tensors from an iterator make the same file as tensors from a dictionary."""
    path = tmp_path / "m.safetensors"
    assert save_safetensors_streaming(iter(STREAM), path, META) == str(path)
    assert collect_state_dict_meta(STREAM) == [(name, dtype, tuple(shape)) for name, dtype, shape in META]
    save(dict(STREAM), tmp_path / "whole")
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("make", [tuple, lambda item: TensorMeta(*item)], ids=["tuple", "TensorMeta"])
def test_streaming_with_any_spelling_of_a_dtype(tmp_path: Path, monkeypatch, make) -> None:
    """Metadata may be plain tuples, with a dtype of torch, its name or the format's; a relative path is returned."""
    monkeypatch.chdir(tmp_path)
    tensor = torch.ones(2, 3, dtype=torch.bfloat16)
    for spelling in (torch.bfloat16, "torch.bfloat16", "bfloat16", "BF16", "bf16"):
        meta: list[StateDictMetaItem] = [make(("w", spelling, (2, 3)))]
        assert save_safetensors_streaming([("w", tensor)], "m.safetensors", meta) == "m.safetensors"
        assert torch.equal(load_file("m.safetensors")["w"], tensor)
    assert save_safetensors_streaming([("w", tensor)], "m", meta, rename=False) == "m.tmp"
    with pytest.raises(MetadataMismatchError, match=r"expected F16 .* got BF16"):
        save_safetensors_streaming([("w", tensor)], "m.safetensors", [make(("w", "half", (2, 3)))])


def test_tables_of_dtypes() -> None:
    """The names and sizes of all types, as the saver that first had these tables has them, and more."""
    assert DTYPE_TO_SAFETENSORS[torch.bfloat16] == "BF16"
    for dtype, name in DTYPE_TO_SAFETENSORS.items():
        assert DTYPE_ELEMENT_SIZE.get(name, dtype.itemsize) == dtype.itemsize


def test_streaming_without_the_last_rename(tmp_path: Path) -> None:
    """With rename=False the complete file is in the target's directory, and the caller moves it."""
    (tmp_path / "m").write_bytes(b"old")
    assert save_safetensors_streaming(STREAM, tmp_path / "m", META, rename=False) == str(tmp_path / "m.tmp")
    assert (tmp_path / "m").read_bytes() == b"old"
    os.replace(tmp_path / "m.tmp", tmp_path / "m")
    assert load_file(tmp_path / "m")["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("stream", "error", "message"),
    [
        ([], MetadataMismatchError, "tensor 'b' and those after it are missing"),
        (STREAM[:1], MetadataMismatchError, "tensor 'a' and those after"),
        ([*STREAM, ("c", torch.ones(1))], MetadataMismatchError, "unexpected tensor 'c' after the last"),
        ([*STREAM, STREAM[0]], MetadataMismatchError, "unexpected tensor 'b' after the last"),
        ([STREAM[1], STREAM[0]], MetadataMismatchError, "expected tensor 'b', got 'a'"),
        ([("B", STREAM[0][1]), STREAM[1]], MetadataMismatchError, "expected tensor 'b', got 'B'"),
        (
            [("b", torch.ones(4)), STREAM[1]],
            MetadataMismatchError,
            r"expected shape \[2, 2\] for 'b', got \[4\]",
        ),
        ([("b", torch.ones(2, 3)), STREAM[1]], MetadataMismatchError, r"\[2, 3\]"),
        (
            [("b", torch.ones(2, 2, dtype=torch.int32)), STREAM[1]],
            MetadataMismatchError,
            "expected F32 for 'b', got I32",
        ),
        ([("b", torch.ones(2, 2).double()), STREAM[1]], MetadataMismatchError, "F64"),
    ],
)
@pytest.mark.parametrize("rename", [True, False])
def test_broken_promises(tmp_path: Path, stream, error, message, rename) -> None:
    """The error for a short, surplus, renamed, reshaped or retyped stream names the tensor, and no file is written."""
    with pytest.raises(error, match=message):
        save_safetensors_streaming(stream, tmp_path / "m", META, rename=rename)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("meta", "error", "message"),
    [
        ([TensorMeta("a", "F31", [1])], SafetensorsError, "has the dtype 'F31', which the format does not know"),
        ([TensorMeta("a", "F32", [-1])], SafetensorsError, "non-negative"),
        ([TensorMeta("a", "F4", [1])], SafetensorsError, "inside a byte"),
        ([META[0], META[0]], MetadataMismatchError, "twice"),
        ([TensorMeta("a", "F32", [1]), TensorMeta("a", "F16", [1])], MetadataMismatchError, "twice"),
    ],
)
def test_promises_that_cannot_be_kept(tmp_path: Path, meta, error, message) -> None:
    """Metadata that breaks a rule of the format is refused before anything is written."""
    with pytest.raises(error, match=message):
        save_safetensors_streaming([], tmp_path / "m", meta)
    assert files(tmp_path) == []


def test_a_header_that_would_be_too_large() -> None:
    """More than the format's 100 MB of header are not begun with."""
    with pytest.raises(SafetensorsError, match="the format allows 100 MB"):
        encode_header([("a", "U8", [0])], {"k": "v" * 100_000_000}, where="m")


def test_a_stream_that_fails(tmp_path: Path) -> None:
    """An iterator that raises in the middle leaves nothing behind."""

    def stream():
        yield STREAM[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_safetensors_streaming(stream(), tmp_path / "m", META)
    assert files(tmp_path) == []


def test_duplicate_names_are_not_a_mapping(tmp_path: Path) -> None:
    """The strict reader refuses what a careless writer would have written for a promise of the same name twice."""
    text = b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    (tmp_path / "m").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(SafetensorsError, match="duplicate key 'a'"):
        nvflare_lazy.open(tmp_path / "m")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_by_umask(tmp_path: Path, umask: int, mode: int) -> None:
    """A file, its shards and its index have the permissions of the umask."""
    before = os.umask(umask)
    try:
        save({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path, max_shard_size=4)
        save({"a": torch.zeros(1)}, tmp_path / "single")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in files(tmp_path)} == {mode}
    assert len(files(tmp_path)) == 4


@pytest.mark.parametrize(
    ("tensors", "options", "error", "message"),
    [
        ({0: torch.ones(1)}, {}, UnserializableTensorError, "the name of a tensor is text, and 0 is not"),
        ({"a": torch.ones(1)}, {"metadata": {1: "a", "b": "c"}}, SafetensorsError, "1 is not text"),
        ({"a": torch.ones(1)}, {"dtype": "bf16"}, UnsupportedDtypeError, "'bf16' is not a torch dtype"),
        ({f"{n}": torch.ones(1) for n in range(501)}, {"max_shard_size": 4}, SaveError, "501 shards"),
    ],
)
def test_mistakes_in_arguments(tmp_path: Path, tensors, options, error, message) -> None:
    """Each error names the object, and no file is written."""
    with pytest.raises(error, match=message):
        save(tensors, tmp_path / "m.safetensors", **options)
    assert list(tmp_path.iterdir()) == []


def test_promises_from_a_generator(tmp_path: Path) -> None:
    """Promised metadata may be any iterable that can be read once."""
    tensors = {"a": torch.ones(1), "b": torch.zeros(2)}
    meta = collect_state_dict_meta(tensors.items())
    save_safetensors_streaming(iter(tensors.items()), tmp_path / "m.safetensors", (promise for promise in meta))
    assert set(load_file(tmp_path / "m.safetensors")) == {"a", "b"}


@pytest.mark.parametrize("kind", ["tied", "expanded"])
def test_a_small_file_does_not_fill_the_disk(tmp_path, kind):
    """A checkpoint that repeats a few bytes is opened, and not written without a bound."""
    if kind == "tied":
        shared = torch.zeros(1 << 16)
        torch.save({str(index): shared for index in range(5000)}, tmp_path / "small.pt")
    else:
        torch.save({"0": torch.zeros(1).expand(1 << 40)}, tmp_path / "small.pt")
    tensors = nvflare_lazy.open(tmp_path / "small.pt")
    with pytest.raises(UnserializableTensorError, match="repeat"):
        save(tensors, tmp_path / "out.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["small.pt"]
    if kind == "tied":
        save({name: tensors[name] for name in ("1", "7")}, tmp_path / "out.safetensors")
        assert len(nvflare_lazy.open(tmp_path / "out.safetensors")) == 2
