# SPDX-License-Identifier: Apache-2.0
"""Many tensors as one vector, read and written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvflare_lazy.aggregation._engine.tile_io import InputVector, OutputVector
from nvflare_lazy.errors import TruncatedSourceError
from nvflare_lazy.formats import StreamingWriter, TensorMeta
from nvflare_lazy.tensors.dtypes import by_torch
from nvflare_lazy.tensors.entry import TensorEntry, entry_of
from nvflare_lazy.tensors.tensor_file import open_source


def part_of(values, source=None):
    return entry_of(values) if source is None else entry_of(values).over(source)


class TestVectors:
    """Many tensors as one."""

    @given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.data())
    def test_reads_across_tensors(self, sizes, data):
        """Any stretch is what the tensors, one after the other, have there."""
        values = [torch.arange(size, dtype=torch.int32) + 100 * index for index, size in enumerate(sizes)]
        whole = torch.cat(values)
        vector = InputVector([part_of(value) for value in values], torch.int32)
        assert vector.numel == len(whole)
        start = data.draw(st.integers(0, len(whole)))
        count = data.draw(st.integers(0, len(whole) - start))
        out = np.empty(count, np.int32)
        vector.read(start, memoryview(out).cast("B"))
        assert np.array_equal(out, whole[start : start + count].numpy())

    def test_neighbours_in_a_file_are_one_request(self, tmp_path):
        """A truncated file raises the usual error, even through borrowed descriptors."""
        path = tmp_path / "numbers"
        np.arange(300, dtype=np.int32).tofile(path)
        file = open_source(path)
        parts = [TensorEntry(file.slice(400 * index, 400), by_torch(torch.int32), (100,)) for index in range(3)]
        vector = InputVector(parts, torch.int32)
        assert len(vector._sources) == 1
        assert len(InputVector(parts[::-1], torch.int32)._sources) == 3
        out = np.empty(250, np.int32)
        with vector:
            vector.read(20, memoryview(out).cast("B"))
            assert np.array_equal(out, np.arange(20, 270))
            with path.open("r+b") as shortened:
                shortened.truncate(800)
            with pytest.raises(TruncatedSourceError, match="numbers ends at byte 800"):
                vector.read(20, memoryview(out).cast("B"))

    def test_writes_across_tensors(self, tmp_path):
        """Tiles are cut where tensors end; each byte is written once."""
        sizes = [3, 0, 5, 1]
        names = [f"t{index}" for index in range(4)]
        metas = [TensorMeta(name, "I32", (size,)) for name, size in zip(names, sizes, strict=True)]
        path = tmp_path / "out.safetensors"
        with StreamingWriter(path, metas) as writer:
            vector = OutputVector(names, sizes, torch.int32, writer)
            for start in (0, 4, 8):
                tile = np.arange(start, min(start + 4, 9), dtype=np.int32)
                vector.write(start, memoryview(tile).cast("B"))
        assert path.read_bytes().endswith(np.arange(9, dtype=np.int32).tobytes())
