# SPDX-License-Identifier: Apache-2.0
"""The storage that lazy tensors share: a byte source, and memory after other code has requested a pointer.

A lazy tensor is a geometry over such a storage, as an ordinary tensor is one over a `torch.UntypedStorage`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nvflare_lazy.errors import SourceError
from nvflare_lazy.tensors.byte_source import ByteSource
from nvflare_lazy.tensors.tensor_memory import new_memory, storage_bytes


class LazyStorage:
    """A byte source that is loaded completely and permanently when code asks for a raw pointer to its bytes.

    A pointer does not reveal how long it will be used. After the first one, the loaded bytes therefore stay for as long
    as any tensor of the storage exists, and every read is served from them: writes through the pointer are visible, as
    they are with an ordinary tensor.
    """

    def __init__(self, source: ByteSource) -> None:
        #: Where to read from: the file, or the pinned memory if there is any.
        self.source = source
        # A dictionary for its `setdefault`, which needs no lock: one that is held while another thread forks stays
        # held in the child for good.
        self._pinned: dict[str, PinnedSource] = {}

    def pin(self) -> torch.UntypedStorage:
        """Load the bytes, once, and return the storage that holds them."""
        pinned = self._pinned.get("")
        if pinned is None:
            loaded = new_memory(torch.uint8, (self.source.nbytes,))
            self.source.read_into(storage_bytes(loaded))
            # If several threads load at the same time, all of them use the bytes that the first one has loaded.
            pinned = self._pinned.setdefault("", PinnedSource(loaded))
            self.source = pinned
        return pinned.storage


class PinnedSource(ByteSource):
    """The loaded bytes of a storage, to which other code has pointers and which it may have moved."""

    def __init__(self, loaded: torch.Tensor) -> None:
        self.storage = loaded.untyped_storage()
        self.nbytes = self.storage.nbytes()

    def _read_into(self, buffer: memoryview, offset: int) -> None:
        left = self.storage.nbytes()
        if offset + len(buffer) > left:
            raise SourceError(f"the storage was resized from {self.nbytes} to {left} bytes")
        whole = new_memory(torch.uint8, (0,)).set_(self.storage)
        buffer[:] = storage_bytes(whole)[offset : offset + len(buffer)]

    def describe(self) -> str:
        return "memory"


class Geometry(NamedTuple):
    """The elements of a lazy tensor, as a geometry over a storage.

    Torch knows everything but the storage, yet each question to a tensor subclass takes torch as long as reading about
    50 KiB.
    """

    storage: LazyStorage
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_plain: bool
    """Whether the elements lie in the storage one after the other, in row-major order."""
