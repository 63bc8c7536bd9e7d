# SPDX-License-Identifier: Apache-2.0
"""Casts, byte order and signs while reading: the same bits as torch and NumPy give, and only floats are cast."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvflare_lazy.errors import UnsupportedDtypeError
from nvflare_lazy.tensors import converted_sources
from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.converted_sources import ByteSwappedSource, CastSource, ConjugatedSource
from nvflare_lazy.tensors.tensor_file import FileSource, TensorFile
from nvflare_lazy.tensors.tensor_memory import storage_bytes
from tests.tensors.byte_source_contract import ByteSourceContract

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


def samples(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a narrow type; of a wide one, random patterns and the hard cases of rounding."""
    if dtype.itemsize <= 2:
        patterns = torch.arange(2 ** (8 * dtype.itemsize))
        return patterns.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)
    random = torch.randint(0, 256, (40_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7)).view(dtype)
    halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 65504.0, 65519.99, 65520.0, 2**-24, 2**-25, 3.39e38], dtype=dtype)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 448.0, 464.0, 1e9], dtype=dtype)
    return torch.cat([random, halfway, special])


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(storage_bytes(tensor))


def cast(tensor: torch.Tensor, to_dtype: torch.dtype) -> CastSource:
    return CastSource(MemorySource(as_bytes(tensor)), tensor.dtype, to_dtype)


class TestNarrowing(ByteSourceContract):
    def make(self, tmp_path):
        values = torch.randn(333, generator=torch.Generator().manual_seed(1))
        (tmp_path / "file").write_bytes(b"head" + as_bytes(values))
        source = FileSource(TensorFile(tmp_path / "file"), 4, values.nbytes)
        return CastSource(source, torch.float32, torch.bfloat16), as_bytes(values.bfloat16())


class TestWideningInSmallTiles(ByteSourceContract):
    @pytest.fixture(autouse=True)
    def small_tiles(self, monkeypatch):
        monkeypatch.setattr(converted_sources, "_TILE_ELEMENTS", 5)

    def make(self, tmp_path):
        values = torch.randn(77, generator=torch.Generator().manual_seed(1)).half()
        return cast(values, torch.float64), as_bytes(values.double())


@pytest.mark.parametrize("to_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("from_dtype", FLOATS, ids=str)
def test_rounds_like_torch(from_dtype, to_dtype):
    """Bit for bit what `.to()` gives: all patterns of the narrow types, NaN payloads and subnormals included."""
    values = samples(from_dtype)
    assert bytes(cast(values, to_dtype).read()) == as_bytes(values.to(to_dtype))


@given(st.data())
def test_any_range(data):
    """Where a read begins and ends makes no difference to the bytes."""
    values = torch.linspace(-3, 3, 600_000)
    made, expected = cast(values, torch.float16), as_bytes(values.half())
    start = data.draw(st.integers(0, made.nbytes))
    stop = data.draw(st.integers(start, made.nbytes))
    assert bytes(made.read(start, stop - start)) == expected[start:stop]


@pytest.mark.parametrize(
    ("from_dtype", "to_dtype"),
    [
        (torch.float32, torch.int32),
        (torch.int64, torch.float32),
        (torch.bool, torch.bfloat16),
        (torch.complex64, torch.float32),
        (torch.float32, torch.complex64),
        (torch.int64, torch.int8),
    ],
    ids=str,
)
def test_refuses_what_loses_more_than_digits(from_dtype, to_dtype):
    """Only floats are cast, to floats; the error names both types."""
    with pytest.raises(UnsupportedDtypeError, match=f"cannot cast {from_dtype} to {to_dtype}"):
        CastSource(MemorySource(bytes(16)), from_dtype, to_dtype)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no 4-bit float")
def test_refuses_what_torch_cannot_cast():
    """An error at once, not while the file is being written."""
    with pytest.raises(UnsupportedDtypeError, match="cannot cast"):
        CastSource(MemorySource(bytes(16)), torch.float4_e2m1fn_x2, torch.bfloat16)


@pytest.mark.parametrize(
    ("from_dtype", "to_dtype", "values", "overflows"),
    [
        (torch.float32, torch.float16, [65504.0, 65505.0, -1e9, float("inf"), float("nan"), 1.0], 2),
        (torch.float64, torch.bfloat16, [1e300, 3e38, float("-inf")], 1),
        (torch.float8_e5m2, torch.float8_e4m3fn, [448.0, 512.0, -57344.0], 2),
        (torch.float16, torch.bfloat16, [65504.0], 0),
        (torch.bfloat16, torch.float32, [3e38], 0),
    ],
)
def test_counts_what_does_not_fit(from_dtype, to_dtype, values, overflows):
    """Finite values beyond the range of the new type are counted; infinities and NaN were so before."""
    source = cast(torch.tensor(values, dtype=torch.float64).to(from_dtype), to_dtype)
    source.read()
    assert source.overflows == overflows


class TestByteSwappedSource(ByteSourceContract):
    def make(self, tmp_path):
        data = np.arange(160, dtype="<u4")
        return ByteSwappedSource(MemorySource(data.tobytes()), 4), data.astype(">u4").tobytes()


class TestByteSwappedSourceWithAnOddEnd(ByteSourceContract):
    def make(self, tmp_path):
        data = np.arange(80, dtype="<u8")
        return ByteSwappedSource(MemorySource(data.tobytes() + b"end"), 8), data.astype(">u8").tobytes() + b"end"


class TestConjugatedSource(ByteSourceContract):
    def make(self, tmp_path):
        data = np.arange(1, 81, dtype="<c8") * (1 - 2j)
        return ConjugatedSource(MemorySource(data.tobytes()), 4, (False, True)), data.conj().tobytes()


class TestNegatedHalves(ByteSourceContract):
    def make(self, tmp_path):
        data = np.arange(-150, 150, dtype="<f2")
        return ConjugatedSource(MemorySource(data.tobytes()), 2, (True,)), (-data).tobytes()
