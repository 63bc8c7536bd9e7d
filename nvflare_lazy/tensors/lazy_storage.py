# SPDX-License-Identifier: Apache-2.0
"""What several lazy tensors may share: the byte source under them, and its memory once somebody took a pointer to it.

A lazy tensor is a geometry over one of these, as an ordinary tensor is one over a `torch.UntypedStorage`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import torch

from nvflare_lazy.tensors.byte_source import MemorySource
from nvflare_lazy.tensors.raw_bytes import new_memory, storage_bytes

if TYPE_CHECKING:
    from nvflare_lazy.tensors.byte_source import ByteSource


class LazyStorage:
    """A byte source that loads itself, whole and for good, when a raw pointer to its bytes is asked for.

    A pointer says nothing about how long it will be used. So from the first one on the loaded bytes stay, for as long
    as any tensor of the storage lives, and every read is served from them: what is written through the pointer is
    seen, as it would be with an ordinary tensor.

    Args:
        source: Where the bytes come from.
    """

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._pinned: torch.Tensor | None = None
        self._lock = threading.Lock()

    @property
    def source(self) -> ByteSource:
        """Where to read from: the file, or the pinned memory if there is any."""
        return self._source

    def pin(self) -> torch.UntypedStorage:
        """Load the bytes, once, and return the storage that holds them."""
        with self._lock:
            if self._pinned is None:
                loaded = new_memory(torch.uint8, (self._source.nbytes,))
                memory = storage_bytes(loaded)
                self._source.read_into(memory)
                self._pinned = loaded
                self._source = MemorySource(memory)
            return self._pinned.untyped_storage()


class Place(NamedTuple):
    """Where the elements of a lazy tensor are: a geometry over a storage.

    Torch knows all of it but the storage, yet asking a tensor of a class of its own takes torch as long as reading
    some 50 KiB, each time.
    """

    storage: LazyStorage
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_plain: bool
    """Whether the elements lie in the storage one after the other, in row-major order."""
