# SPDX-License-Identifier: Apache-2.0
"""Atomic replacement of one checkpoint by the next, even if the power fails.

The last step of every save. A single file is replaced by one rename. Several shards cannot be, so they are published
under names that no checkpoint in the directory uses, and become valid when an index lists them.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import contextmanager, suppress
from math import prod
from typing import TYPE_CHECKING

from nvflare_lazy._text import get_logger
from nvflare_lazy.errors import FormatError
from nvflare_lazy.formats.atomic_file import AtomicFile, directory_descriptor, sync_directory
from nvflare_lazy.formats.safetensors.shards import (
    INDEX_SUFFIX,
    SUFFIX,
    ShardName,
    index_path,
    parse_shard_name,
    read_weight_map,
    shard_stem,
)
from nvflare_lazy.tensors.tensor_file import TensorFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from nvflare_lazy.tensors.tensor_file import StoredTensor

logger = get_logger(__name__)


def publish_file(file: AtomicFile) -> None:
    """Publish a checkpoint of one file, and replace whatever checkpoint had its name."""
    if file.fsync:
        file.sync()
    with _locked(file.directory):
        file.publish()
        if file.fsync:
            sync_directory(file.directory)
        # A single file counts before shards and index of its name, so those are garbage now.
        _remove_garbage(file.directory, [*_shards_of(file.path), os.path.basename(index_path(file.path))])


def publish_shards(shards: Sequence[tuple[AtomicFile, Mapping[str, StoredTensor]]], path: str) -> None:
    """Publish files, each with its tensors, as one checkpoint, which replaces the one of its name."""
    for file, _ in shards:
        if file.fsync:
            file.sync()
    directory = os.path.dirname(path)
    with AtomicFile(index_path(path)) as index, _locked(directory):
        garbage = _shards_of(path)
        names = _free_names(directory, path, len(shards))
        index.write_at(_index_text({name: tensors for name, (_, tensors) in zip(names, shards, strict=True)}), 0)
        index.sync()
        try:
            for name, (file, _) in zip(names, shards, strict=True):
                file.publish(name)
            # The shards must have their names before an index may.
            sync_directory(directory)
            index.publish()
            sync_directory(directory)
        finally:
            # A signal may arrive at any line, and once the index is there it is too late to call the save off.
            if index.is_published():
                # Where one file was the checkpoint, it counts until it is gone.
                _remove(path)
                _remove_garbage(directory, garbage)
            else:
                _remove_garbage(directory, names)
        sync_directory(directory)


def _index_text(files: Mapping[str, Mapping[str, StoredTensor]]) -> bytes:
    """Return the text of an index, with the members that transformers writes."""
    stored = [tensor for tensors in files.values() for tensor in tensors.values()]
    index = {
        "metadata": {
            "total_parameters": sum(prod(tensor.shape) for tensor in stored),
            "total_size": sum(tensor.nbytes for tensor in stored),
        },
        "weight_map": {tensor: name for name, tensors in files.items() for tensor in tensors},
    }
    return (json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _shards_of(path: str) -> list[str]:
    """Return the shards of the checkpoint, including those of an interrupted save.

    The shards of `model` and of `model.safetensors` have the same names. The index of `model` names its
    own, all others belong to `model.safetensors`.
    """
    stem = shard_stem(path)
    parsed = {name: parse_shard_name(name) for name in os.listdir(os.path.dirname(path))}
    shards = [name for name, shard in parsed.items() if shard is not None and shard.stem == stem]
    without_suffix = _named_by(index_path(path.removesuffix(SUFFIX)))
    return [name for name in shards if (name in without_suffix) != path.endswith(SUFFIX)]


def _named_by(index: str) -> set[str]:
    try:
        return set(read_weight_map(TensorFile(index)).values())
    except (FileNotFoundError, FormatError):
        return set()


def _free_names(directory: str, path: str, count: int) -> list[str]:
    """Return names for shards that are not taken, and that do not count before there is an index."""
    taken = set(os.listdir(directory))
    indexed = os.path.basename(index_path(path)) in taken
    generation = 1 if indexed or not any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in taken) else 2
    while True:
        names = [str(ShardName(shard_stem(path), number, count, generation)) for number in range(1, count + 1)]
        if taken.isdisjoint(names):
            return names
        generation += 1


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _remove_garbage(directory: str, names: Iterable[str]) -> None:
    for name in names:
        try:
            _remove(os.path.join(directory, name))
        except OSError as error:
            # The checkpoint is complete and counts, whatever else is in the directory.
            logger.warning("Cannot remove the obsolete file %s: %s", os.path.join(directory, name), error)


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Let one process at a time change which checkpoint counts in a directory."""
    with directory_descriptor(directory) as fd:
        # Without locks in the file system, two concurrent saves of one checkpoint leave either.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
