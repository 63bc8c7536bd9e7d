# SPDX-License-Identifier: Apache-2.0
"""`ParametersOnDisk`: within its block, new tensors are in files instead of memory, with the values they would have.

The process that instantiates a model class runs in it, so that a model larger than memory can be instantiated.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from typing_extensions import Self

aten = torch.ops.aten
# A tensor below this size stays in memory: sixteen thousand of them take 64 MiB.
_MIN_BYTES = 4 << 10
# A larger tensor has its own file; smaller ones share files.
_OWN_FILE_BYTES = 1 << 20
_SHARED_FILE_BYTES = 16 << 20
_ALIGNMENT = 64
# These return memory that was never written; asking torch for it would take the memory of the whole tensor.
_UNWRITTEN = frozenset(
    (
        *(aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default),
        *(aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default),
    )
)
_CPU = torch.device("cpu")


class ParametersOnDisk(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate its base class
    """Moves each new tensor of 4 KiB or more into a file mapping, as soon as an operator returns it.

    Operators compute with the same kernels on the same values, and random numbers are drawn in the same order, so the
    values equal an ordinary instantiation. At most the result of one operator is in memory, plus the memory that the
    operator itself needs. Views, ties and in-place writes act on the mapping. A small tensor that an operator enlarges
    (`out=`) stays in memory. The files have no names; the kernel removes each of them with its last tensor, or with the
    process.

    Args:
        directory: Where the files are; its disk needs room for the parameters and for temporary results.

    Example:
        >>> with ParametersOnDisk(directory):
        ...     model = Model()
        >>> save(model.state_dict(), directory / "model.safetensors")
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._files = _MappedFiles(directory)
        self._clone_storage = torch.UntypedStorage.clone

    def __enter__(self) -> Self:
        def clone(storage: Any) -> torch.UntypedStorage:
            return self._on_disk(storage)

        # copy.deepcopy() of a buffer copies its storage without an operator.
        torch.UntypedStorage.clone = clone  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.clone = self._clone_storage  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch loads its compiler, which takes 70 MiB and seconds.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _UNWRITTEN and not types:
            unwritten = self._unwritten(func, args, kwargs)
            if unwritten is not None:
                return unwritten
        if func is aten.resize_.default and _is_large(args[0]):
            self._make_room(args[0], args[1])
        result = func(*args, **kwargs)
        if not any(map(_is_large, tree_flatten(result)[0])):
            return result
        # Storages of arguments stay where they are: the result is a view, or was written in place.
        moved: dict[int | None, torch.UntypedStorage | None] = {
            _identity(value): None for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)
        }
        if func is aten.lift_fresh.default:
            moved.clear()  # the values of `torch.tensor([...])`, which no other tensor has
        return tree_map(lambda value: self._moved(value, moved) if _is_large(value) else value, result)

    def _unwritten(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return a new tensor whose geometry torch decides, or None if it is small or not an ordinary one."""
        like = args[0] if args and isinstance(args[0], torch.Tensor) else None
        device = kwargs.get("device") or (_CPU if like is None else like.device)
        if torch.device(device) != _CPU or kwargs.get("pin_memory"):
            return None
        geometry = func(*args, **{**kwargs, "device": "meta"})
        if geometry.layout is not torch.strided or geometry.is_quantized:
            return None
        nbytes = geometry.untyped_storage().nbytes()
        return _view(self._files.storage(nbytes), geometry) if nbytes >= _MIN_BYTES else None

    def _moved(self, tensor: torch.Tensor, moved: dict[int | None, torch.UntypedStorage | None]) -> torch.Tensor:
        """Return a tensor in a file with the elements of a new one; results that share memory continue to."""
        identity = _identity(tensor)
        if identity not in moved:
            moved[identity] = self._on_disk(tensor.untyped_storage())
        storage = moved[identity]
        return tensor if storage is None else _view(storage, tensor)

    def _on_disk(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a copy of a storage."""
        if storage.device != _CPU or storage.nbytes() < _MIN_BYTES:
            kept: torch.UntypedStorage = self._clone_storage(storage)  # type: ignore[no-untyped-call]
            return kept
        copied: torch.UntypedStorage = self._files.storage(storage.nbytes()).copy_(storage)
        return copied

    def _make_room(self, tensor: torch.Tensor, shape: Sequence[int]) -> None:
        """Replace the memory of a tensor that grows in place, which a file mapping cannot."""
        needed = int(tensor.storage_offset() + prod(shape)) * tensor.itemsize
        old = tensor.untyped_storage()
        if needed > old.nbytes():
            storage = self._files.storage(needed)
            before, after = (torch.empty(0, dtype=torch.uint8, device=_CPU).set_(part) for part in (old, storage))
            after[: old.nbytes()].copy_(before)
            tensor.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


class _MappedFiles:
    """Makes storages in files without names."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._shared = memoryview(b"")

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """Return zeros."""
        if nbytes >= _OWN_FILE_BYTES:
            return _storage(self._map(nbytes), nbytes)
        with self._lock:
            if len(self._shared) < nbytes:
                self._shared = self._map(_SHARED_FILE_BYTES)
            part, self._shared = self._shared, self._shared[-(-nbytes // _ALIGNMENT) * _ALIGNMENT :]
        return _storage(part, nbytes)

    def _map(self, nbytes: int) -> memoryview:
        with tempfile.TemporaryFile(dir=self._directory, prefix=".parameters-") as file:
            # On a full disk, a write to a mapping without reserved space would end the process.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return memoryview(mmap.mmap(file.fileno(), nbytes))


def _storage(view: memoryview, nbytes: int) -> torch.UntypedStorage:
    with torch._C._DisableTorchDispatch():
        return torch.frombuffer(view[:nbytes], dtype=torch.uint8).untyped_storage()


def _view(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same geometry over another storage."""
    empty = torch.empty(0, dtype=like.dtype, device=_CPU)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


def _is_large(value: object) -> bool:
    return (
        type(value) is torch.Tensor
        and value.device == _CPU
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_conj() or value.is_neg())
        and value.untyped_storage().nbytes() >= _MIN_BYTES
    )


def _identity(tensor: torch.Tensor) -> int | None:
    """Return what tensors that share memory have in common."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
