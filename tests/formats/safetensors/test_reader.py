# SPDX-License-Identifier: Apache-2.0
"""Safetensors files as lazy tensors: equal to what the library loads, and read no further than asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import nvflare_lazy
from nvflare_lazy.errors import SourceReleasedError, UnsupportedDtypeError
from nvflare_lazy.formats import open_safetensors, save
from nvflare_lazy.tensors.dtypes import ELEMENT_TYPES
from tests.formats.safetensors.header_mutations import entry, message

DTYPES = [row.torch for row in ELEMENT_TYPES if row.name and row.torch]
SHAPES = [(), (1,), (5,), (0,), (2, 0, 3), (3, 4), (2, 3, 4)]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of random bits (of 0 and 1, if it is of truth values)."""
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are of the same type, shape and bits, NaNs included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_to_the_library(tmp_path: Path, dtype: torch.dtype) -> None:
    """Each type in each shape reads as `safe_open` reads it, as a file written by the library and as one by us."""
    tensors = {
        f"t{shape}": random_tensor(dtype, shape)
        for shape in SHAPES
        if not (dtype == torch.float4_e2m1fn_x2 and shape == ())
    }
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    save_file(tensors, theirs)
    save(tensors, ours)
    for path in (theirs, ours):
        lazy = open_safetensors(path)
        with safe_open(path, "pt") as reference:
            assert set(lazy) == set(reference.keys())
            for name in lazy:
                assert same_bits(lazy[name].materialize(), reference.get_tensor(name))
                assert same_bits(lazy[name].materialize(), tensors[name])


def test_metadata_and_order(tmp_path: Path) -> None:
    """Metadata is kept, and the names come in the order of the file."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(
        message({"z": entry("U8", [1], [1, 2]), "__metadata__": {"k": "v"}, "a": entry("U8", [1], [0, 1])}, b"\7\x08")
    )
    lazy = open_safetensors(path)
    assert lazy.metadata == {"k": "v"}
    assert list(lazy) == ["a", "z"]
    assert lazy["z"].item() == 8


def test_unaligned_data(tmp_path: Path) -> None:
    """A tensor may start at any byte."""
    path = tmp_path / "m.safetensors"
    header = {"a": entry("U8", [1], [0, 1]), "b": entry("F64", [2], [1, 17])}
    for padding in range(8):
        text = json.dumps(header).encode() + b" " * padding
        path.write_bytes(message(text, b"\1" + np.array([1.5, -2.5]).tobytes()))
        assert open_safetensors(path)["b"].tolist() == [1.5, -2.5]


def test_what_torch_cannot_hold(tmp_path: Path) -> None:
    """6-bit floats, and pairs that would reach over the end of a row, are listed and copied, but not used."""
    path, copy = tmp_path / "m.safetensors", tmp_path / "copy.safetensors"
    header = {
        "six": entry("F6_E2M3", [4], [0, 3]),
        "odd": entry("F4", [2, 3], [3, 6]),
        "pairs": entry("F4", [2, 4], [6, 10]),
    }
    path.write_bytes(message(header, b"0123456789"))
    lazy = open_safetensors(path)
    assert set(lazy) == {"six", "odd", "pairs"}
    for name in ("six", "odd"):
        untyped = lazy.entries[name]
        assert untyped.element_type.name == header[name]["dtype"]
        assert untyped.nbytes == 3
        for use in (lambda name=name: lazy[name], untyped.array, lambda untyped=untyped: untyped.dtype):
            with pytest.raises(UnsupportedDtypeError, match="listed, copied and saved"):
                use()
    assert lazy["pairs"].shape == (2, 2)
    assert bytes(lazy["pairs"].materialize().view(torch.uint8).reshape(-1)) == b"6789"

    save(lazy, copy)
    copied = open_safetensors(copy)
    assert bytes(copied.entries["six"].source.read()) == b"012"
    assert bytes(copied.entries["odd"].source.read()) == b"345"
    lazy.cleanup()
    with pytest.raises(SourceReleasedError):
        lazy.entries["six"].source.read()


def test_reads_no_more_than_it_has_to(tmp_path: Path, rchar, rss_anon) -> None:
    """Opening reads the beginning of the file, one tensor its own bytes, one row a row."""
    path = tmp_path / "m.safetensors"
    save({f"layer{index}": torch.full((1024, 1024), float(index)) for index in range(16)}, path)
    open_safetensors(path)
    before, memory = rchar(), rss_anon()
    lazy = nvflare_lazy.open(path)
    assert rchar() - before < 128 << 10
    before = rchar()
    assert lazy["layer7"].materialize()[5, 5] == 7
    assert (4 << 20) <= rchar() - before < (4 << 20) + (64 << 10)
    before = rchar()
    assert lazy["layer9"][3].sum() == 9 * 1024
    assert rchar() - before < 16 << 10
    assert rss_anon() - memory < 8 << 20


def test_one_descriptor_for_all_tensors(tmp_path: Path, no_gc: None) -> None:
    """A thousand tensors share a descriptor, which is closed with the last of them."""
    path = tmp_path / "m.safetensors"
    save({str(index): torch.tensor(index) for index in range(1000)}, path)

    def count() -> int:
        return sum(os.path.realpath(f"/proc/self/fd/{fd}") == str(path) for fd in os.listdir("/proc/self/fd"))

    lazy = open_safetensors(path)
    tensors = list(lazy.values())
    assert [int(tensor) for tensor in tensors[:3]] == [int(name) for name in list(lazy)[:3]]
    assert count() == 1
    last = tensors.pop()
    del lazy, tensors
    assert count() == 1
    assert int(last) >= 0
    del last
    assert count() == 0


def test_replaced_file_is_still_the_old_one(tmp_path: Path) -> None:
    """A checkpoint that is saved over stays readable for those who have it open."""
    path = tmp_path / "m.safetensors"
    save({"a": torch.tensor(1)}, path)
    old = open_safetensors(path)
    save({"a": torch.tensor(2)}, path)
    assert old["a"].item() == 1
    assert open_safetensors(path)["a"].item() == 2


def test_nvflare_compatible_constructor(tmp_path: Path) -> None:
    """`LazyTensorDict(key_to_file, temp_dir)` finds its tensors in the files, and removes the directory."""
    directory = tmp_path / "received"
    directory.mkdir()
    paths = [str(directory / name) for name in ("one", "two")]
    save({"x": torch.tensor([1.0])}, paths[0])
    save({"x": torch.tensor([2.0]), "y": torch.tensor([3.0])}, paths[1])
    lazy = nvflare_lazy.LazyTensorDict({"a": (paths[0], "x"), "b": (paths[1], "y")}, str(directory))
    assert [tensor.item() for tensor in lazy.values()] == [1.0, 3.0]
    lazy.cleanup()
    assert not directory.exists()


def test_missing_file(tmp_path: Path) -> None:
    """A file that is not there is Python's own error."""
    with pytest.raises(FileNotFoundError, match="missing"):
        open_safetensors(tmp_path / "missing")
