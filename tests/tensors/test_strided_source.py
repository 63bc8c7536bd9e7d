# SPDX-License-Identifier: Apache-2.0
"""Strided views read as torch reads them, whatever the geometry and however the read is cut up."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvflare_lazy.tensors import strided_source
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.strided_source import StridedSource, contiguous_strides, is_contiguous
from nvflare_lazy.tensors.tensor_file import open_source
from nvflare_lazy.tensors.tensor_memory import extent
from tests.tensors.byte_source_contract import ByteSourceContract


class TestTransposed(ByteSourceContract):
    def make(self, tmp_path):
        matrix = np.arange(400, dtype=np.uint16).reshape(20, 20)
        return StridedSource(MemorySource(matrix.tobytes()), 2, (20, 20), (1, 20), 0), matrix.T.tobytes()


class TestEverySecondOfWideElements(ByteSourceContract):
    def make(self, tmp_path):
        array = np.arange(64, dtype=np.complex128).reshape(8, 8)
        (tmp_path / "file").write_bytes(array.tobytes())
        return StridedSource(open_source(tmp_path / "file"), 16, (8, 4), (8, 2), 1), array[:, 1::2].tobytes()


@st.composite
def views(draw):
    """A geometry, its storage size, and a range of its elements."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    strides = tuple(draw(st.integers(0, 40)) for _ in shape)
    offset = draw(st.integers(0, 10))
    numel = int(np.prod(shape, dtype=int))
    start = draw(st.integers(0, numel))
    stop = draw(st.integers(start, numel))
    return shape, strides, offset, start, stop


@given(view=views(), itemsize=st.sampled_from([1, 2, 4, 8]), cheap=st.sampled_from([0, 64, 65536]))
def test_reads_what_torch_reads(view, itemsize, cheap):
    """Any geometry, any range of elements, with reads merged or split: the same elements as `as_strided`."""
    shape, strides, offset, start, stop = view
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]
    storage = torch.randint(0, 100, (offset + max(extent(shape, strides), 1),), dtype=dtype)
    expected = storage.as_strided(shape, strides, offset).contiguous().reshape(-1)[start:stop]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strided_source, "_CHEAP_BYTES", cheap)
        patch.setattr(strided_source, "_BLOCK_BYTES", 256)
        source = StridedSource(MemorySource(storage.numpy().tobytes()), itemsize, shape, strides, offset)
        read = source.read(start * itemsize, (stop - start) * itemsize)
    assert bytes(read) == expected.numpy().tobytes()


@given(view=views())
def test_contiguity_is_torchs(view):
    """What counts as contiguous here counts as contiguous in torch, and the other way round."""
    shape, strides, *_ = view
    assert is_contiguous(shape, strides) == torch.empty_strided(shape, strides).is_contiguous()
    assert contiguous_strides(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "message"),
    [
        ((10,), (1,), 1, "ends at byte 11"),
        ((2, 5), (6, 1), 0, "ends at byte 11"),
        ((2**40, 2**40), (2**40, 1), 0, "ends at byte"),
        ((2,), (-1,), 1, "must not be negative"),
        ((2,), (1, 1), 0, "cannot have strides"),
        ((1,), (1,), -1, "must not be negative"),
    ],
)
def test_geometry_outside_of_the_storage_is_an_error(shape, strides, offset, message):
    """A view that reaches beyond its storage is refused before anything is read."""
    with pytest.raises(ValueError, match=message):
        StridedSource(MemorySource(bytes(10)), 1, shape, strides, offset)


def test_column_of_a_large_matrix_reads_little(tmp_path, rchar):
    """A column is gathered from blocks, not by reading the matrix: and a hole in a file costs nothing."""
    rows, columns = 256, 1 << 20
    path = tmp_path / "matrix"
    with path.open("wb") as file:
        file.truncate(rows * columns * 4)
        for row in range(rows):
            os.pwrite(file.fileno(), np.float32(row).tobytes(), (row * columns + 5) * 4)
    source = StridedSource(open_source(path), 4, (rows,), (columns,), 5)
    before = rchar()
    column = np.frombuffer(source.read(), dtype=np.float32)
    assert rchar() - before < 64 << 10
    np.testing.assert_array_equal(column, np.arange(rows))


def test_memory_stays_at_a_block(tmp_path, rss_anon):
    """Gathering a transposed tensor of 64 MiB into a reused tile needs a few blocks of memory, not the tensor."""
    side = 4096
    path = tmp_path / "matrix"
    with path.open("wb") as file:
        file.truncate(side * side * 4)
    source = StridedSource(open_source(path), 4, (side, side), (1, side), 0)
    tile = bytearray(4 << 20)
    source.read_into(tile, 0)
    before = rss_anon()
    for offset in range(0, 16 << 20, len(tile)):
        source.read_into(tile, offset)
        assert rss_anon() - before < 12 << 20
