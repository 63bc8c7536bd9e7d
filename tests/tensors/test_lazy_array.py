# SPDX-License-Identifier: Apache-2.0
"""A lazy array gives what the loaded array would give, in every use there is."""

from __future__ import annotations

import copy
import io
import operator
import pickle

import numpy as np
import pytest
import torch

from nvflare_lazy.errors import ImmutableTensorError, UnsupportedDtypeError
from nvflare_lazy.tensors.byte_source import ByteSource, MemorySource
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor

X = np.arange(48, dtype=np.float32).reshape(6, 8) % 7 + 1
Y = np.arange(48, dtype=np.float32).reshape(6, 8) + 1


def lazy(array: np.ndarray) -> LazyArray:
    return LazyArray(MemorySource(np.ascontiguousarray(array).tobytes()), array.dtype, array.shape)


class Untouchable(ByteSource):
    """Fails the test when anything is read from it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        raise AssertionError("this use must cost no I/O")

    def describe(self) -> str:
        return "the untouchable"


USES = {
    "arithmetic": lambda x, y: (x + y, 2 + x, 1 - x, 1 / x, 2**x, x // y, x % 3, -x, abs(x), divmod(x, 2)),
    "matmul": lambda x, y: (x @ y.T, y.T @ x),
    "compare": lambda x, y: (x == y, x != y, x < y, x <= 3, x > y, x >= y),
    "bits": lambda x, y: ((x > 1) & (y > 1), ~(x > 1)),
    "index": lambda x, y: (x[2], x[-1, -2], x[1:5:2, ::3], x[[0, 3, 3]], x[y > 20], x[None, ..., 0]),
    "slices": lambda x, y: (x[1:3], x[:], x[5:2], x[-2:], x[::2], x[::-1]),
    "iterate": lambda x, y: (list(x), list(x[0])),
    "ufunc": lambda x, y: (np.add(x, y), np.sqrt(x), np.add.reduce(x, axis=0), np.add.outer(x[0], y[0])),
    "ufunc out elsewhere": lambda x, y: np.add(x, y, out=np.empty((6, 8), np.float32)),
    "functions": lambda x, y: (
        np.concatenate([x, y]), np.stack((x, y)), np.where(x > y, x, y), np.mean(x, axis=0), np.linalg.norm(x),
        np.allclose(x, y), np.array_equal(x, x), np.einsum("ij,kj->ik", x, y), np.dot(x, y.T), np.sort(x),
        np.percentile(x, 30), np.zeros_like(x), np.split(x, 2), np.isfinite(x), np.shape(x), np.outer(x, y),
    ),
    "methods": lambda x, y: (
        x.sum(), x.mean(axis=1), x.T, x.reshape(-1), x.ravel(), x.flatten(), x.astype("i4"), x.max(),
        x.argmax(), x.tolist(), x.tobytes(), x.copy(), x.copy("F"), x.view(np.int32), x.dot(y.T), x.transpose(1, 0),
        x.item(3), x.nonzero(), x.squeeze(), x.clip(1, 3), x.all(), x.real, x.swapaxes(0, 1),
    ),
    "conversions": lambda x, y: (np.asarray(x), np.array(x, dtype=np.float64), np.ascontiguousarray(x)),
    "scalars": lambda x, y: (float(x[0, 0]), int(x[0, 1]), bool(x[0, 0] > 3), f"{x[0, 0]:.2f}", 3.0 in x, 1e9 in x),
    "questions": lambda x, y: (
        x.shape, x.dtype, x.ndim, x.size, x.nbytes, x.itemsize, x.strides, len(x), isinstance(x, np.ndarray),
        x.__class__, x.flags.c_contiguous,
    ),
    "torch": lambda x, y: (torch.as_tensor(np.array(x)).numpy(), torch.tensor(x).numpy()),
    "write elsewhere": lambda x, y: setitem(np.zeros((6, 8)), slice(0, 6), x),
    "augmented elsewhere": lambda x, y: operator.iadd(np.ones((6, 8), np.float32), x),
}  # fmt: skip


def setitem(target, key, value):
    target[key] = value
    return target


def assert_same(got: object, expected: object) -> None:
    if isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b)
    elif isinstance(expected, np.ndarray):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(np.asarray(got), expected)
    else:
        assert got == expected
        assert type(got) is type(expected)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("which", ["first", "second", "both"])
def test_gives_what_the_loaded_array_gives(use, which):
    """Every use in the table: the same values, dtypes, shapes and types as without laziness."""
    x, y = (lazy(X) if which != "second" else X), (lazy(Y) if which != "first" else Y)
    assert_same(USES[use](x, y), USES[use](X, Y))


@pytest.mark.parametrize(
    "dtype", ["?", "u1", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16", ">f4", "M8[s]", "S3"]
)
def test_every_dtype_loads(dtype):
    """All dtypes that have bytes, 0-d and empty arrays included."""
    for shape in ((), (1,), (0,), (3, 0, 2), (4, 6)):
        array = np.zeros(shape, dtype) if np.dtype(dtype).kind in "MS" else np.ones(shape, dtype)
        made = lazy(array)
        for got in (made.materialize(), made.copy(), copy.deepcopy(made), np.asarray(made)):
            assert_same(got, array)
        # NumPy pickles big-endian arrays as little-endian ones.
        assert_same(pickle.loads(pickle.dumps(made)), pickle.loads(pickle.dumps(array)))


def test_questions_cost_no_reading():
    """Shape and the like, row slices, copies and repr touch no byte of the source."""
    made = LazyArray(Untouchable(192), np.float32, (6, 8))
    assert (made.shape, made.size, made.nbytes, len(made), made.strides) == ((6, 8), 48, 192, 6, (32, 4))
    for part in (made[2], made[1:4], made[2][3:5], copy.copy(made), copy.deepcopy(made), *made):
        assert isinstance(part, LazyArray)
    assert repr(made) == str(made) == "LazyArray(shape=(6, 8), dtype=float32, in the untouchable)"
    assert isinstance(made, np.ndarray)
    assert hasattr(made, "sum")
    with pytest.raises(AssertionError, match="no I/O"):
        made.sum()


def test_row_indices_are_checked():
    """Indices outside the array raise as NumPy's do."""
    for index in (6, -7):
        with pytest.raises(IndexError):
            lazy(X)[index]
    with pytest.raises(IndexError):
        lazy(np.float32(3).reshape(()))[0]
    with pytest.raises(TypeError, match="unsized"):
        len(lazy(np.zeros(())))
    with pytest.raises(TypeError, match="unhashable"):
        hash(lazy(X))


WRITES = {
    "setitem": lambda a: operator.setitem(a, 0, 1),
    "iadd": lambda a: operator.iadd(a, 1),
    "imul": lambda a: operator.imul(a, 2.0),
    "ufunc out": lambda a: np.add(X, 1, out=a),
    "ufunc at": lambda a: np.add.at(a, [0], 1),
    "function out": lambda a: np.mean(X[None], axis=0, out=a),
    "fill": lambda a: a.fill(0),
    "sort": lambda a: a.sort(),
    "put": lambda a: a.put([0], 1),
    "resize": lambda a: a.resize((2, 2)),
    "partition": lambda a: a.partition(2),
    "setflags": lambda a: a.setflags(write=True),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_raise(write):
    """Every way to write in place raises an error with a remedy."""
    made = lazy(X)
    with pytest.raises(ImmutableTensorError, match=r"call materialize\(\)"):
        WRITES[write](made)
    assert_same(made.materialize(), X)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.T,
        lambda a: a.reshape(-1),
        lambda a: a.ravel(),
        lambda a: a.view(np.int32),
        lambda a: a[:, 1],
        lambda a: np.asarray(a),
        lambda a: np.reshape(a, -1),
        lambda a: a.real,
    ],
)
def test_views_are_read_only(view):
    """A write to a view would not reach the array: NumPy refuses it."""
    with pytest.raises(ValueError, match="read-only"):
        view(lazy(X))[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        np.copyto(lazy(X), 0)


def test_raw_memory_is_not_handed_out():
    """C code that asks for memory by pointer gets a copy or an error, never the address of something freed."""
    made = lazy(X)
    with pytest.raises(TypeError, match=r"expected np\.ndarray"):
        torch.from_numpy(made)
    for name in ("__array_interface__", "__array_struct__", "ctypes"):
        assert not hasattr(made, name)
    with pytest.raises(TypeError, match="bytes-like"):
        memoryview(made)
    assert bytes(made.data) == X.tobytes()
    assert_same(np.from_dlpack(made), X)
    with pytest.raises(ValueError, match="allow a copy"):
        np.asarray(made, copy=False)
    with pytest.raises(AttributeError, match="'LazyArray' object has no attribute 'cuda'"):
        made.cuda()


def test_saves_like_an_array():
    """`np.save` and pickle write the elements."""
    file = io.BytesIO()
    np.save(file, lazy(X))
    file.seek(0)
    assert_same(np.load(file), X)
    assert type(pickle.loads(pickle.dumps(lazy(X)))) is np.ndarray


def test_reads_tiles():
    """`read_into` fills a buffer with any run of elements."""
    tile = np.zeros(5, np.float32)
    lazy(X).read_into(tile, 7)
    assert_same(tile, X.reshape(-1)[7:12])
    with pytest.raises(ValueError, match="exactly 4 elements"):
        lazy(X).read_into(tile, 0, 4)


def test_from_lazy_tensor():
    """A lazy tensor becomes a lazy array without I/O, unless NumPy has no such dtype."""
    tensor = torch.arange(12, dtype=torch.int16).reshape(3, 4)
    assert_same(LazyArray.from_lazy_tensor(LazyTensor.from_tensor(tensor)).materialize(), tensor.numpy())
    assert_same(LazyArray.from_lazy_tensor(LazyTensor.from_tensor(tensor).T).materialize(), tensor.T.numpy())
    with pytest.raises(UnsupportedDtypeError, match="bfloat16"):
        LazyArray.from_lazy_tensor(LazyTensor.from_tensor(tensor.bfloat16()))


def test_what_has_no_bytes_is_refused():
    """Arrays of Python objects, and sources of another size, are refused when the array is made."""
    with pytest.raises(UnsupportedDtypeError, match="Python objects"):
        LazyArray(MemorySource(bytes(8)), object, (1,))
    with pytest.raises(ValueError, match="requires 8 bytes, got 7"):
        LazyArray(MemorySource(bytes(7)), np.float64, (1,))
    with pytest.raises(ValueError, match="shape"):
        LazyArray(MemorySource(bytes(4)), np.float32, (-1, -1))
    with pytest.raises(UnsupportedDtypeError, match="without bytes"):
        LazyArray(MemorySource(b""), "S0", (3,))
    lazy(X).read_into(np.zeros((0, 8), np.float32), 3)


def test_operators_are_those_of_arrays():
    """Operators equal the array's, even where the ufunc of that name does not: powers of flags, text."""
    flags = X > 3
    assert_same(lazy(flags) ** 2, flags**2)
    assert_same(lazy(X) == "text", X == "text")
    assert_same([1.0] * 8 + lazy(X), [1.0] * 8 + X)
    assert_same(X ** lazy(X), X**X)
