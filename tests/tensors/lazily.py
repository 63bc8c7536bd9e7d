# SPDX-License-Identifier: Apache-2.0
"""Making lazy tensors out of ordinary ones, and telling whether two results are the same."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils import _pytree

from nvflare_lazy.tensors.byte_source import ByteSource, MemorySource
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.tensors.tensor_memory import storage_bytes


class CountingSource(MemorySource):
    """Counts the bytes that are read from it."""

    bytes_read = 0

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        self.bytes_read += len(buffer)
        super()._read_into(buffer, offset)


class Untouchable(ByteSource):
    """Fails the test when anything is read from it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        raise AssertionError("this use must cost no I/O")

    def describe(self) -> str:
        return "the untouchable"


def lazy(tensor: torch.Tensor) -> LazyTensor:
    """Return a lazy tensor of the same elements, row-major, over separate memory."""
    contiguous = tensor.detach().contiguous()
    source = MemorySource(bytes(storage_bytes(contiguous)))
    return LazyTensor(source, tensor.dtype, tuple(tensor.shape))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return an ordinary tensor of the same elements: what `lazy` is compared with."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of random bits, the same every time."""
    generator = torch.Generator().manual_seed(7)
    data = torch.randint(
        0, 100, (int(np.prod(shape, dtype=int)) * dtype.itemsize,), dtype=torch.uint8, generator=generator
    )
    if dtype == torch.bool:
        data %= 2
    return data.view(dtype).reshape(shape)


def assert_same(got: object, expected: object) -> None:
    """Equality of type, dtype, shape and bits, through containers."""
    got_leaves, got_spec = _pytree.tree_flatten(got)
    leaves, spec = _pytree.tree_flatten(expected)
    assert got_spec == spec
    for a, b in zip(got_leaves, leaves, strict=True):
        if isinstance(b, torch.Tensor):
            assert isinstance(a, torch.Tensor)
            assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
            a, b = (x.detach().resolve_conj().resolve_neg().contiguous() for x in (a, b))
            a = a.materialize() if isinstance(a, LazyTensor) else a
            assert bytes(storage_bytes(a)) == bytes(storage_bytes(b))
        elif isinstance(b, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        elif b != b:
            assert a != a
        else:
            assert a == b
