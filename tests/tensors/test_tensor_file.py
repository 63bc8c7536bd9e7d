# SPDX-License-Identifier: Apache-2.0
"""The contents of a file, and whether a model is exactly what some files hold."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

import nvflare_lazy
from nvflare_lazy.errors import TruncatedSourceError
from nvflare_lazy.formats import open_safetensors, save
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.entry import files_holding
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.tensors.tensor_file import FileSource, TensorFile
from tests.measure import rchar

TENSORS = {"a": torch.ones(2, 3), "b": torch.arange(6, dtype=torch.float32), "empty": torch.ones(0, 4)}


@pytest.fixture
def model(tmp_path):
    return open_safetensors(save(TENSORS, tmp_path / "m.safetensors"))


def test_the_file_of_a_model(model):
    """Tensors or arrays, in any order."""
    (file,) = model.files()
    assert files_holding({name: model[name] for name in reversed([*model])}) == [file]
    assert files_holding({name: entry.array() for name, entry in model.entries.items()}) == [file]


def test_the_files_of_a_model_in_shards(tmp_path):
    """All of them, in the order of their names; with a tensor under another name it is a different model."""
    model = nvflare_lazy.open(save(TENSORS, tmp_path / "m.safetensors", max_shard_size=32))
    files = files_holding(model)
    assert len(files) == 2
    assert files == sorted(model.files(), key=lambda file: file.path)
    assert files_holding({"a": model["a"], "c": model["b"], "empty": model["empty"]}) == []


def other(**values: Any):
    return lambda model: {**model, **values}


@pytest.mark.parametrize(
    "changed",
    [
        lambda model: {},
        lambda model: {"a": model["a"], "b": model["b"]},
        lambda model: {"a": model["b"], "b": model["a"], "empty": model["empty"]},
        lambda model: {**model, "a": model["a"].reshape(3, 2)},
        lambda model: {**model, "a": model["b"].reshape(2, 3)},
        lambda model: {**model, "a": model["a"].view(torch.int32)},
        lambda model: {**model, "a": LazyArray(model["a"].source, np.dtype(">f4"), (2, 3))},
        lambda model: {**model, "empty": LazyTensor(MemorySource(b""), torch.float32, (0, 5))},
        other(c=torch.ones(1)),
        other(a=TENSORS["a"]),
        other(a=LazyTensor(MemorySource(bytes(24)), torch.float32, (2, 3))),
        other(a=np.ones((2, 3), np.float32)),
        other(a=None),
    ],
)
def test_other_models_have_no_file(model, changed):
    """Another name, type, shape, position or file, and bytes that are not in a file."""
    assert files_holding(changed(model)) == []


def test_a_file_without_contents(tmp_path, model):
    """A received file is not recognised: its contents are not known."""
    (file,) = model.files()
    file.contents = None
    assert files_holding(model) == []


def test_still_at(tmp_path):
    """By device and inode, not by name; a closed file is nowhere."""
    path = tmp_path / "file"
    path.write_bytes(b"1")
    file = TensorFile(path)
    (tmp_path / "link").hardlink_to(path)
    assert file.is_still_at(tmp_path / "link")
    path.unlink()
    assert not file.is_still_at(path)
    path.write_bytes(b"1")
    assert not file.is_still_at(path)
    file.close()
    assert not file.is_still_at(tmp_path / "link")


LARGE = torch.arange(1 << 19, dtype=torch.float32)


def finished_file(path, *, shareable=True):
    """A file that this package has finished, with tensors at an odd position."""
    path.write_bytes(bytes(12) + LARGE.numpy().tobytes())
    return TensorFile(path, shareable=shareable)


def lazy_part(file, dtype=torch.float32):
    return LazyTensor(FileSource(file, 12, LARGE.nbytes), dtype, (-1 + LARGE.nbytes // dtype.itemsize,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64], ids=str)
def test_operators_use_a_mapping(tmp_path, dtype):
    """A pointwise operator computes on the page cache, and gives what it gives in memory."""
    lazy = lazy_part(finished_file(tmp_path / "f"), dtype)
    in_memory = lazy.materialize()
    before = rchar()
    result = lazy.mul(3)
    copied = rchar() - before > lazy.nbytes
    # Elements of 8 bytes do not start at byte 12.
    assert copied == (dtype == torch.float64)
    del lazy
    assert torch.equal(result.view(torch.uint8), in_memory.mul(3).view(torch.uint8))


def test_sums_are_computed_in_aligned_memory(tmp_path):
    """Libraries may add in another order elsewhere: only pointwise operators use a mapping."""
    lazy = lazy_part(finished_file(tmp_path / "f"))
    before = rchar()
    lazy.sum()
    assert rchar() - before > lazy.nbytes


def test_files_of_others_are_not_mapped(tmp_path):
    """Another program may cut them short, and an access to the mapping would end the process."""
    assert finished_file(tmp_path / "f", shareable=False).map(0, 1 << 20) is None


def test_a_mapped_file_that_became_shorter(tmp_path):
    """The kernel cannot find all pages: the tensor is read instead, which names the error."""
    lazy = lazy_part(finished_file(tmp_path / "f"))
    os.truncate(tmp_path / "f", 1 << 20)
    with pytest.raises(TruncatedSourceError, match=f"ends at byte {1 << 20}"):
        lazy.mul(3)


def test_a_mapping_does_not_write_to_its_file(tmp_path):
    """Memory that code writes to in spite of everything does not change the file, which other processes may read."""
    file = finished_file(tmp_path / "f")
    memory = file.map(12, 1 << 20)
    memory[:] = bytes(1 << 20)
    assert lazy_part(file).materialize()[5] == 5
