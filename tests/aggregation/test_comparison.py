# SPDX-License-Identifier: Apache-2.0
"""`compare()` against NumPy in float64, for every type, and its memory for a model that is larger than that."""

from __future__ import annotations

import itertools
import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import nvflare_lazy
from benchmarks.aggregation_limits import make_cold
from nvflare_lazy.aggregation import comparison
from nvflare_lazy.aggregation.comparison import Tolerance, compare
from nvflare_lazy.tensors.entry import entry_of
from nvflare_lazy.tensors.tensor_file import FileSource
from tests.cli.sparse import write_sparse

FLOATS = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]
FULL_SIZES = {name: getattr(comparison, name) for name in ("STEP_BYTES", "_BLOCK", "_PART", "_EXACT_PART")}
INTEGERS = [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.uint32, torch.int64, torch.uint64]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Tensors of a few thousand elements consist of several pieces, and pieces of several blocks."""
    for name, value in (("STEP_BYTES", 20_000), ("_BLOCK", 1024), ("_PART", 512), ("_EXACT_PART", 200)):
        monkeypatch.setattr(comparison, name, value)


def one(a, b, tolerance=None):
    [found] = compare({"w": a}, {"w": b}, tolerance).tensors
    return found


def random_values(dtype: torch.dtype, seed: int, count: int, *, finite: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors: close and equal values, zeros, other signs, very small and large values, NaN and inf."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(count, generator=generator, dtype=torch.float64)
    b = a + torch.randn(count, generator=generator, dtype=torch.float64) * 10.0 ** -torch.randint(
        0, 6, (count,), generator=generator
    )
    kind = torch.randint(0, 12, (count,), generator=generator)
    b = torch.where(kind == 0, a, b)
    a, b = torch.where(kind == 1, 0.0, a), torch.where(kind <= 2, torch.where(kind == 2, 0.0, b), b)
    b = torch.where(kind == 3, -b, b)
    if not finite:
        odd = torch.tensor([math.nan, math.inf, -math.inf, 1.0], dtype=torch.float64)
        at = torch.randperm(count, generator=generator)[: max(1, count // 10)]
        a[at] = odd[torch.randint(0, 4, at.shape, generator=generator)]
        b[at] = odd[torch.randint(0, 4, at.shape, generator=generator)]
    return a.to(dtype), b.to(dtype)


def expected(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> dict[str, object]:
    """Return what NumPy finds in float64."""
    x, y = a.double().numpy(), b.double().numpy()
    finite = np.isfinite(x) & np.isfinite(y)
    close = np.isclose(x, y, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)
    found = {
        "different": int((~close).sum()),
        "non_finite": int((~close & ~finite).sum()),
        "nan": (int(np.isnan(x).sum()), int(np.isnan(y).sum())),
        "inf": (int(np.isinf(x).sum()), int(np.isinf(y).sum())),
    }
    x, y = x[finite], y[finite]
    error = np.abs(x - y)
    ratio = error[y != 0] / np.abs(y[y != 0])
    norms = np.linalg.norm(x) * np.linalg.norm(y)
    return {
        **found,
        "max_abs": error.max(initial=0.0),
        "mean_abs": error.mean() if len(error) else 0.0,
        "max_rel": ratio.max(initial=0.0),
        "mean_rel": ratio.mean() if len(ratio) else 0.0,
        "cosine": float(x @ y / norms) if norms else None,
    }


def steps(values: torch.Tensor) -> list[int]:
    """Return the place of each value among all numbers of its type, by sign and magnitude, in Python's integers."""
    width = 8 * values.dtype.itemsize
    bits = values.view(getattr(torch, f"uint{width}")).numpy().tolist()
    top = 1 << (width - 1)
    return [-(number - top) if number >= top else number for number in bits]


def check(found, a, b, tolerance=None):
    for name, value in expected(a, b, tolerance or Tolerance()).items():
        rel = 1e-5 if isinstance(value, float) else None
        assert getattr(found, name) == (value if rel is None else pytest.approx(value, rel=rel, abs=1e-7)), name


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floating_point(dtype, finite):
    """All numbers are NumPy's; ULPs are differences of places among the numbers of the type."""
    for seed, count in enumerate((1, 2, 511, 512, 513, 1025, 8000)):
        a, b = random_values(dtype, seed, count, finite=finite)
        found = one(a, b)
        check(found, a, b)
        usable = (a.double().isfinite() & b.double().isfinite()).tolist()
        places = [abs(x - y) for x, y, use in zip(steps(a), steps(b), usable, strict=True) if use]
        assert found.max_ulps == max(places, default=0)
        assert found.same == (found.different == 0)
        assert one(a, a.clone()).same


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_ulps_of_numpy(dtype):
    """ULPs are equal to the ULPs from NumPy's own test functions."""
    a, b = random_values(dtype, 7, 2000, finite=True)
    # NumPy's overflow between signs, and are rounded to the type.
    b = torch.where((a < 0) == (b < 0), b, a)
    b = torch.where((a - b).abs() < 1e-2 * a.abs(), b, a)
    ulps = np.testing.assert_array_max_ulp(a.numpy(), b.numpy(), maxulp=math.inf)
    assert one(a, b).max_ulps == pytest.approx(float(ulps.max()), rel=1e-3)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers(dtype):
    """Differences of integers are exact, even between the ends of 64 bits."""
    generator = np.random.default_rng(0)
    limits = torch.iinfo(dtype)
    arrays = [generator.integers(limits.min, limits.max, 3000, dtype=str(dtype)[6:], endpoint=True) for _ in "ab"]
    arrays[0][0], arrays[1][0] = limits.min, limits.max
    a, b = map(torch.from_numpy, arrays)
    found = one(a, b)
    errors = [abs(x - y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert found.different == sum(map(bool, errors))
    assert found.max_abs == float(max(errors))
    assert found.mean_abs == pytest.approx(sum(errors) / 3000)
    assert found.max_ulps is None
    if limits.bits == 64:
        huge = torch.tensor([limits.max], dtype=dtype)
        assert one(huge, torch.tensor([limits.max - 1], dtype=dtype)).max_abs == 1.0


def test_bools():
    """The mean difference is the share of different elements."""
    found = one(torch.tensor([True, False, True, True]), torch.tensor([True, True, False, True]))
    assert (found.different, found.max_abs, found.mean_abs, found.max_ulps) == (2, 1.0, 0.5, None)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_complex(dtype):
    """Differences are absolute values of complex numbers; their ULPs are counted in the real and imaginary parts."""
    parts = [random_values(dtype.to_real(), seed, 2000, finite=True) for seed in range(2)]
    pairs = [torch.stack([parts[0][index], parts[1][index]], dim=-1) for index in range(2)]
    a, b = (pair.view(dtype)[:, 0] for pair in pairs)
    found = one(a, b)
    x, y = (torch.view_as_complex(pair.double()).numpy() for pair in pairs)
    assert found.max_abs == pytest.approx(np.abs(x - y).max())
    assert found.mean_abs == pytest.approx(np.abs(x - y).mean())
    assert found.max_rel == pytest.approx((np.abs(x - y)[y != 0] / np.abs(y[y != 0])).max())
    assert found.cosine == pytest.approx(np.vdot(x, y).real / (np.linalg.norm(x) * np.linalg.norm(y)))
    assert found.max_ulps == max(one(*pair).max_ulps for pair in parts)
    pairs[0][3] = torch.tensor([math.nan, math.inf])
    found = one(a, b)
    assert (found.nan, found.inf, found.non_finite) == ((1, 0), (0, 0), 1)


@pytest.mark.parametrize("tolerance", [Tolerance(atol=1e-3), Tolerance(rtol=1e-2), Tolerance(1e-4, 1e-4)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS[:4], ids=str)
def test_tolerance(dtype, tolerance):
    """Elements are accepted as numpy.allclose accepts them."""
    for finite in (True, False):
        a, b = random_values(dtype, 3, 4000, finite=finite)
        check(one(a, b, tolerance), a, b, tolerance)
        within = b + b * tolerance.rtol * 0.5
        assert one(within, b, tolerance).same == np.allclose(
            within.double(), b.double(), tolerance.rtol, tolerance.atol, equal_nan=True
        )


@pytest.mark.parametrize("dtype", FLOATS[1:6], ids=str)
def test_types_that_differ(dtype):
    """Values are compared as they are; ULPs count in the type with fewer digits, to which the other one is rounded."""
    a, _ = random_values(torch.float64, 5, 2000, finite=True)
    b = a.to(dtype)
    found = one(a, b)
    check(found, a, b)
    assert (found.max_ulps, found.same) == (0, False)
    assert one(b, a, Tolerance(rtol=0.5, atol=0.5)).same
    # Without a tolerance, the same values of another type are a difference.
    assert not one(b, b.double()).same
    assert one(b, b.double(), Tolerance()).same
    assert one(torch.tensor([1, 2]), torch.tensor([1.0, 2.0]), Tolerance()).same


def test_values_out_of_the_range_of_squares():
    """Neither very small nor very large values lose the cosine, the differences or the ULPs."""
    for scale in (1e-30, 1e30):
        a, b = (values * scale for values in random_values(torch.float32, 2, 2000, finite=True))
        check(one(a, b), a, b)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ulps_of_few_elements(dtype):
    """The largest number of ULPs is found if one element has it: with another sign, a zero, or neither."""
    generator = torch.Generator().manual_seed(0)
    base = (1 + torch.rand(1000, generator=generator)).to(dtype)
    nearly = (base.view(getattr(torch, f"int{8 * dtype.itemsize}")) - 1).view(dtype)
    tiny = torch.finfo(dtype).smallest_normal
    for a, b in ((-1.5, 1.5), (tiny, -tiny), (0.0, 1.0), (1.0, 0.0), (tiny, 0.0), (0.0, 0.0), (2.0, 1.0), (1.0, 1.0)):
        first, second = base.clone(), nearly.clone()
        first[77], second[77] = a, b
        places = [abs(x - y) for x, y in zip(steps(first), steps(second), strict=True)]
        assert one(first, second).max_ulps == max(places), (a, b)
        check(one(first, second), first, second)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_least_error_for_more_steps(dtype):
    """Numbers with more steps between them have no smaller difference, unless it is less than half of a number."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, (2, 20_000, dtype.itemsize), generator=generator, dtype=torch.uint8)
    a, b = (each.view(dtype).view(-1).double() for each in bits)
    # Numbers of similar size have the most steps for their difference.
    a, b = (torch.cat(some).to(dtype) for some in ([a, a, a], [b, -a, -0.7 * b]))
    usable = a.double().isfinite() & b.double().isfinite() & ((a.double() - b.double()).abs() >= b.double().abs() / 2)
    a, b = a[usable], b[usable]
    apart = np.array([abs(x - y) for x, y in zip(steps(a), steps(b), strict=True)], dtype=np.float64)
    error = (a.double() - b.double()).abs().numpy()
    for known in np.quantile(apart, np.linspace(0, 1, 30)).astype(np.uint64).tolist():
        more = apart > known
        assert error[more].min(initial=math.inf) >= comparison._least_error(dtype, known)


def test_cosine_of_almost_equal_tensors():
    """It has more digits than the product of two tensors in float32."""
    a = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    b = a + 1e-4 * torch.randn(3000, generator=torch.Generator().manual_seed(1))
    exact = torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0)
    assert 1 - one(a, b).cosine == pytest.approx(1 - float(exact), rel=1e-4)
    assert one(a, -a).cosine == pytest.approx(-1)
    assert one(a, torch.zeros(3000)).cosine is None
    large = torch.full((3,), 1e200, dtype=torch.float64)
    assert one(large, 2 * large).cosine is None


def test_cosine_of_constant_tensors(monkeypatch):
    """Sums of many equal values keep their digits: parallel tensors have a cosine of 1."""
    for name, value in FULL_SIZES.items():
        monkeypatch.setattr(comparison, name, value)
    found = one(torch.full((1 << 18,), 0.7), torch.full((1 << 18,), 0.1))
    assert found.cosine == pytest.approx(1, abs=1e-6)
    assert found.mean_abs == pytest.approx(0.6, rel=1e-6)


def test_structure(tmp_path):
    """Names, shapes and types: empty tensors and scalars are compared, tensors with other shapes are not read."""
    a = {"x": torch.ones(2), "empty": torch.zeros(0, 3), "one": torch.tensor(2.0), "shape": torch.ones(2, 3)}
    b = {"y": torch.ones(2), "empty": torch.zeros(0, 3), "one": torch.tensor(2.5), "shape": torch.ones(3, 2)}
    found = compare(a, b)
    assert (found.only_in_a, found.only_in_b, found.same) == (("x",), ("y",), False)
    assert [(tensor.name, tensor.same, tensor.max_abs) for tensor in found.tensors] == [
        ("shape", False, None),
        ("one", False, 0.5),
        ("empty", True, 0.0),
    ]


def test_blocks_of_full_size(monkeypatch):
    """The memory of a thread suffices for all pairs of types, with a tolerance, and with values that are not finite."""
    for name, value in FULL_SIZES.items():
        monkeypatch.setattr(comparison, name, value)
    base = torch.randn((1 << 19) + 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    types = (torch.float64, torch.bfloat16, torch.complex128)
    for first, second in itertools.product(types, types):
        a, b = base.to(first), (base * 1.01).to(second)
        b[::7] = 0
        found = one(a, b, Tolerance(1e-3, 1e-3))
        assert found.elements == len(base)
        assert (found.max_ulps is None) == (first.is_complex != second.is_complex)
        a[0] = math.nan
        assert one(a, b, Tolerance(1e-3, 1e-3)).nan == (1, 0)


def test_types_without_arithmetic(tmp_path):
    """Their bytes are compared."""
    shapes = {"f4": ("F4", (4, 8)), "f6": ("F6_E2M3", (4, 4)), "f8": ("F8_E8M0", (3,))}
    write_sparse(tmp_path / "a", shapes)
    write_sparse(tmp_path / "b", shapes)
    with (tmp_path / "b").open("r+b") as file:
        file.seek(-31, 2)
        file.write(b"\xff")
    found = compare(nvflare_lazy.open(tmp_path / "a"), nvflare_lazy.open(tmp_path / "b"))
    assert sorted((tensor.different, tensor.max_abs is None) for tensor in found.tensors) == [
        *((0, False), (0, True), (1, True)),
    ]
    if hasattr(torch, "float8_e8m0fnu"):
        a, b = (torch.tensor(bits, dtype=torch.uint8).view(torch.float8_e8m0fnu) for bits in ([1, 127], [200, 127]))
        assert one(a, b).max_ulps == 199


def test_views_and_tied_tensors(tmp_path, rchar):
    """Transposed tensors are compared by their elements; tied tensors are read one time and listed by each name."""
    base = torch.randn(600, 500)
    torch.save({"a": base, "b": base, "t": base.t()}, tmp_path / "a.pt")
    other = base.clone()
    other[5, 7] += 1
    torch.save({"a": other, "b": other, "t": other.t()}, tmp_path / "b.pt")
    models = [nvflare_lazy.open(tmp_path / name) for name in ("a.pt", "b.pt")]
    before = rchar()
    found = compare(*({name: model.entries[name] for name in "ab"} for model in models))
    assert rchar() - before < 2 * base.nbytes + (1 << 20)
    assert [(tensor.name, tensor.different) for tensor in found.tensors] == [("a", 1), ("b", 1)]
    [turned] = compare({"t": models[0]["t"]}, {"t": models[1]["t"]}).tensors
    assert turned.different == 1


def test_the_same_numbers_for_any_number_of_threads():
    """Sums have the same bits, whichever thread is faster."""
    model = {f"w{seed}": random_values(torch.float32, seed, 5000, finite=True) for seed in range(6)}
    a, b = ({name: pair[index] for name, pair in model.items()} for index in range(2))
    assert len({compare(a, b, threads=threads) for threads in (1, 2, 3)}) == 1


def test_errors_of_reading():
    """A tensor that cannot be read ends the comparison with its error."""
    entry = entry_of(torch.ones(4))

    class Broken(type(entry.source)):
        def _read_into(self, buffer, offset):
            raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable"):
        compare({"w": entry.over(Broken(bytes(16)))}, {"w": torch.ones(4)})


@pytest.mark.parametrize("is_aligned", [True, False])
def test_from_the_disk(tmp_path, monkeypatch, is_aligned):
    """Bytes that were read ahead are compared in place, if the place fits the type; the numbers are the same."""
    for name, value in FULL_SIZES.items():
        monkeypatch.setattr(comparison, name, value)
    monkeypatch.setattr(comparison, "STEP_BYTES", 1 << 20)
    small = {f"small{index:04d}": torch.randn(37) for index in range(300)}
    a = {"first": torch.arange(8 - (not is_aligned), dtype=torch.uint8), "large": torch.randn(700_001), **small}
    b = {name: tensor * 3 if name == "first" else tensor * 1.01 for name, tensor in a.items()}
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, model in zip(paths, (a, b), strict=True):
        path.write_bytes(_safetensors(model))
    try:
        make_cold(paths)
    except RuntimeError:
        pytest.skip("this file system keeps its files in memory")
    read = []
    read_into = FileSource._read_into
    monkeypatch.setattr(FileSource, "_read_into", lambda *args: (read.append(args), read_into(*args)))
    assert compare(*map(nvflare_lazy.open, paths)) == compare(a, b)
    assert bool(read) is not is_aligned


def _safetensors(model):
    """A file without gaps, in the order of the model."""
    header, offset = {}, 0
    for name, tensor in model.items():
        dtype = "U8" if tensor.dtype is torch.uint8 else "F32"
        end = offset + tensor.nbytes
        header[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": [offset, end]}
        offset = end
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % 8)
    return struct.pack("<Q", len(written)) + written + b"".join(tensor.numpy().tobytes() for tensor in model.values())


LIMITED = """
import sys, threading, time
import nvflare_lazy
from nvflare_lazy.aggregation.comparison import compare
from benchmarks.measuring import PeakMemory
a, b = (nvflare_lazy.open(path) for path in sys.argv[1:3])
with PeakMemory() as memory:
    found = compare(a, b, threads=2)
assert found.same and found.tensors[0].elements == int(sys.argv[3]), found
print(memory.growth)
"""


@pytest.mark.slow
def test_model_larger_than_the_limit(tmp_path):
    """One tensor of 6 GiB is compared by a process that may take less than 96 MiB for it."""
    elements = 3 << 30
    for name in "ab":
        write_sparse(tmp_path / name, {"w": ("BF16", (elements,))})
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "a"), str(tmp_path / "b"), str(elements)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 96 << 20
