# SPDX-License-Identifier: Apache-2.0
"""`save()`: writes tensors to safetensors files as a stream, with at most one tile of a lazy tensor in memory.

Saves the new global model of a round, converted checkpoints, and models that users compute.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nvflare_lazy._text import format_size, get_logger, quoted
from nvflare_lazy.errors import (
    MetadataMismatchError,
    UnserializableTensorError,
    UnsupportedDtypeError,
    UnsupportedTensorError,
)
from nvflare_lazy.formats._commit import publish_file, publish_shards
from nvflare_lazy.formats.atomic_file import AtomicFile
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.formats.safetensors.layout import (
    StateDictMeta,
    StateDictMetaItem,
    TensorMeta,
    in_file_order,
    to_tensor_metas,
)
from nvflare_lazy.formats.safetensors.writer import StreamingWriter, checkpoint_path
from nvflare_lazy.remote.url import display
from nvflare_lazy.tensors import dtypes
from nvflare_lazy.tensors.converted_sources import CastSource, check_cast
from nvflare_lazy.tensors.entry import entry_of, geometry_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from nvflare_lazy.tensors.byte_source import ByteSource
    from nvflare_lazy.tensors.dtypes import ElementType
    from nvflare_lazy.tensors.tensor_file import TensorFile


logger = get_logger(__name__)

# Tied and expanded tensors are written once for each name. Real checkpoints repeat a few of their tensors a few times.
_MAX_REPETITIONS = 64
_FREE_REPEATED_BYTES = 1 << 30


def save(
    tensors: Mapping[str, object],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    dtype: torch.dtype | None = None,
    like: str | os.PathLike[str] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Path | str:
    """Save tensors as safetensors; the old checkpoint stays until all of them are on the disk.

    A checkpoint of that name is replaced atomically, including its shards and its index. A killed save leaves
    the old one or the new one.

    The same tensors give the same bytes, identical to the bytes that `safetensors.torch.save_file` writes with the same
    metadata. Tensors that share memory are written once for each name, because the format cannot express that they are
    the same.

    Args:
        tensors: Tensors or arrays by name, lazy or ordinary.
        path: The file, or a directory for `model.safetensors`. A directory that does not exist, such as "newdir/", is
            created. Or a URL such as "s3://bucket/model.safetensors" or "s3://bucket/directory": then each file is
            written to a temporary file and uploaded when it is complete, the index last.
        metadata: Text to store with them, in addition to `format: pt`, which transformers and accelerate require.
            A given `format` is kept. Default: the metadata of a `LazyTensorDict`.
        max_shard_size: Split a larger checkpoint, for example "5GB", into several files and an index.
        dtype: Cast floating-point tensors to this type. Values that are too large for it are logged as a warning.
        like: A Hugging Face directory, whose configuration, tokenizer and adapter configuration are copied next to the
            tensors, so that `from_pretrained(path)` loads them.
        progress: Called with a number of bytes each time some were written; for a URL, uploaded, in another thread.

    Returns:
        What to open: the file, or the index of the shards; for a URL, its URL as text.

    Example:
        >>> save(nvflare_lazy.open("pytorch_model.bin"), "model.safetensors", dtype=torch.bfloat16)
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise UnsupportedDtypeError(f"{dtype!r} is not a torch dtype such as torch.bfloat16")
    where = display(os.fspath(path))
    for name in tensors:
        if not isinstance(name, str):
            raise UnserializableTensorError(f"{where}: the name of a tensor is text, and {name!r} is not")
    if metadata is None and isinstance(tensors, LazyTensorDict):
        metadata = tensors.metadata
    # Recipes, where there are some: a tensor that torch cannot hold can be copied all the same.
    values = tensors.entries if isinstance(tensors, LazyTensorDict) else tensors
    in_order = in_file_order([tensor_meta(name, value, dtype=dtype) for name, value in values.items()])
    if isinstance(tensors, LazyTensorDict):
        _check_repetition(tensors, where)
    with StreamingWriter(
        path, in_order, metadata=metadata, max_shard_size=max_shard_size, like=like, progress=progress
    ) as writer:
        overflows = {}
        for meta in in_order:
            source = tensor_bytes(meta.name, values[meta.name], dtype=dtype)
            writer.copy(meta.name, source)
            if isinstance(source, CastSource) and source.overflows:
                overflows[meta.name] = source.overflows
        writer.commit()
    saved = writer.checkpoint_path
    if overflows:
        logger.warning(
            "%s: %d values, in %d tensors (%s the first), are too large for %s: they became infinite or its largest",
            *(display(str(saved)), sum(overflows.values()), len(overflows), quoted(next(iter(overflows))), dtype),
        )
    return saved


def link_checkpoint(files: Sequence[TensorFile], path: str | os.PathLike[str], *, fsync: bool = True) -> bool:
    """Save the tensors of complete files, with known contents, by another name for each file, without a copy.

    A checkpoint of that name is replaced as `save()` replaces it.

    Args:
        files: The files; several become shards.
        path: The file. Its directory must exist.
        fsync: Have the bytes on the disk before the checkpoint appears.

    Returns:
        Whether it is saved. False if a file is removed, or the file system does not have links.
    """
    with ExitStack() as links:
        try:
            shards = [
                (links.enter_context(AtomicFile(path, fsync=fsync, existing=file)), file.contents or {})
                for file in files
            ]
        except OSError as error:
            logger.info("Cannot link to %s (%s); copying it", files[0].path, error)
            return False
        if len(shards) == 1:
            publish_file(shards[0][0])
        else:
            publish_shards(shards, os.path.realpath(path))
    return True


def _check_repetition(tensors: LazyTensorDict, path: str) -> None:
    """Raise if a checkpoint of a few bytes, which repeats or expands them, would fill the disk."""
    sources = {id(entry.source): entry.source.nbytes for entry in tensors.entries.values()}
    total, distinct = tensors.nbytes, sum(sources.values())
    if total > _FREE_REPEATED_BYTES + _MAX_REPETITIONS * distinct:
        raise UnserializableTensorError(
            f"{path} would have {format_size(total)}, because {len(tensors)} tensors repeat {format_size(distinct)}; "
            "save only the tensors that you need"
        )


def save_safetensors_streaming(
    tensor_iter: Iterable[tuple[str, torch.Tensor]],
    filepath: str | os.PathLike[str],
    state_dict_meta: Iterable[StateDictMetaItem],
    *,
    rename: bool = True,
) -> str:
    """Save a stream of tensors whose metadata is known in advance.

    Args:
        tensor_iter: Names and tensors, in the promised order.
        filepath: The file.
        state_dict_meta: Name, dtype and shape of each tensor; a dtype may be torch's or have torch's name. A tensor
            that is missing, surplus, renamed, reshaped or retyped raises `MetadataMismatchError`, without a file.
        rename: Whether the file gets the name `filepath`, with its bytes on the disk. Otherwise its name is
            `filepath` + ".tmp", and the caller flushes and renames it.

    Returns:
        The path of the file that was written, relative if `filepath` is.

    Example:
        >>> meta = collect_state_dict_meta(model.state_dict().items())
        >>> save_safetensors_streaming(model.state_dict().items(), "model.safetensors", meta)
    """
    target = os.fspath(filepath) if rename else f"{os.fspath(filepath)}.tmp"
    path, metas = checkpoint_path(target), to_tensor_metas(state_dict_meta)
    with StreamingWriter(target, metas, fsync=rename) as writer:
        expected = iter(metas)
        for name, tensor in tensor_iter:
            promise = next(expected, None)
            if promise is None:
                raise MetadataMismatchError(f"{target}: unexpected tensor {quoted(name)} after the last promised one")
            _check_metadata(promise, tensor_meta(name, tensor), target)
            writer.copy(name, tensor_bytes(name, tensor))
        missing = next(expected, None)
        if missing is not None:
            raise MetadataMismatchError(f"{target}: tensor {quoted(missing.name)} and those after it are missing")
    return path


def collect_state_dict_meta(tensor_iter: Iterable[tuple[str, torch.Tensor]]) -> StateDictMeta:
    """Return the metadata of a stream of tensors.

    Example:
        >>> meta = collect_state_dict_meta(model.state_dict().items())
    """
    return [tensor_meta(name, tensor) for name, tensor in tensor_iter]


def _check_metadata(promise: TensorMeta, meta: TensorMeta, where: str) -> None:
    if meta.name != promise.name:
        raise MetadataMismatchError(f"{where}: expected tensor {quoted(promise.name)}, got {quoted(meta.name)}")
    if meta.dtype != promise.dtype:
        raise MetadataMismatchError(f"{where}: expected {promise.dtype} for {quoted(meta.name)}, got {meta.dtype}")
    if tuple(meta.shape) != tuple(promise.shape):
        raise MetadataMismatchError(
            f"{where}: expected shape {list(promise.shape)} for {quoted(meta.name)}, got {list(meta.shape)}"
        )


def tensor_meta(name: str, value: object, *, dtype: torch.dtype | None = None) -> TensorMeta:
    """Return what a file's header has about a tensor, array or entry, if floating-point tensors are cast to `dtype`."""
    try:
        element_type, shape = geometry_of(value)
        if _is_cast(element_type, dtype):
            assert dtype is not None
            check_cast(_torch_type(element_type, dtype), dtype)
            element_type = dtypes.by_torch(dtype)
    except UnsupportedDtypeError as error:
        raise UnsupportedDtypeError(f"tensor {quoted(name)}: {error}") from None
    except UnsupportedTensorError as error:
        raise UnserializableTensorError(f"{quoted(name)} cannot be saved: {error}") from None
    if element_type.name is None:
        raise UnsupportedDtypeError(
            f"tensor {quoted(name)} is {element_type.torch}, which safetensors files do not support; convert it first, "
            "for example with .to(torch.complex64)"
        )
    if element_type.packed != 1:
        if not shape:
            raise UnserializableTensorError(
                f"tensor {quoted(name)} is a single {element_type.torch}, which has {element_type.packed} elements"
            )
        shape = (*shape[:-1], shape[-1] * element_type.packed)
    return TensorMeta(name, element_type.name, shape)


def tensor_bytes(name: str, value: object, *, dtype: torch.dtype | None = None) -> ByteSource:
    """Return the bytes that a file contains of a tensor, unread."""
    try:
        entry = entry_of(value)
    except UnsupportedTensorError as error:
        raise UnserializableTensorError(f"{quoted(name)} cannot be saved: {error}") from None
    if not _is_cast(entry.element_type, dtype):
        return entry.rows()
    assert dtype is not None
    return CastSource(entry.rows(), entry.dtype, dtype)


def _is_cast(element_type: ElementType, dtype: torch.dtype | None) -> bool:
    known = element_type.torch
    return dtype is not None and known != dtype and (known is None or known.is_floating_point)


def _torch_type(element_type: ElementType, dtype: torch.dtype) -> torch.dtype:
    if element_type.torch is None:
        raise UnsupportedDtypeError(f"torch cannot cast {element_type.name} to {dtype}")
    return element_type.torch
