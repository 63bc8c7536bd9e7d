# SPDX-License-Identifier: Apache-2.0
"""Atomic replacement of one checkpoint by the next, even if the power fails.

The last step of every save. A single file is replaced by one rename. Several shards cannot be, so they are published
under names that no checkpoint in the directory uses, and become valid when an index lists them. `_remote_commit` does
the same at a URL.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from nvflare_lazy._text import get_logger
from nvflare_lazy.errors import FormatError
from nvflare_lazy.formats.atomic_file import AtomicFile, directory_descriptor, sync_directory
from nvflare_lazy.formats.safetensors.header import end_of
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
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from nvflare_lazy.formats.hugging_face.model_directory import ModelDirectory
    from nvflare_lazy.tensors.tensor_file import StoredTensor

    #: Receives the uploaded bytes and the total during uploads; an exception cancels.
    OnWait = Callable[[int, int], object]

logger = get_logger(__name__)


@dataclass
class Shard:
    """One file of a checkpoint being written.

    Attributes:
        number: Which one, from 0.
        header: Its first bytes.
        contents: Its tensors.
        missing: The number of bytes of tensors that have not been written.
        file: The file, or None until its first byte is written.
        lock: Held while the file is created.
    """

    number: int
    header: bytes
    contents: Mapping[str, StoredTensor]
    missing: int
    file: AtomicFile | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return end_of(self.contents, len(self.header))


class LocalOutput:
    """Where the files of a checkpoint are written: next to the place where they will appear.

    Args:
        path: Where the checkpoint will appear.
        fsync: Have the bytes on the disk before.
        unfinished_in: The directory in which other processes open the files until then, or None.
    """

    def __init__(self, path: str, *, fsync: bool, unfinished_in: str | None) -> None:
        self._path = path
        self._fsync = fsync
        self._unfinished_in = unfinished_in

    def start(self, shards: Sequence[Shard]) -> None:
        """Create all files, so that a disk without room for them is noticed now."""
        for shard in shards:
            shard.file = self.new_file(shard)

    def new_file(self, shard: Shard) -> AtomicFile:
        """Return a file with the header of a shard, and room for its tensors."""
        hidden = hidden_path(self._unfinished_in, shard)
        return start_file(AtomicFile(self._path, fsync=self._fsync, hidden=hidden), shard, is_shared=hidden is not None)

    def complete(self, shard: Shard) -> None:
        """Nothing is left to do when all bytes of a file are written: the files are published together."""

    def publish(self, shards: Sequence[Shard], like: ModelDirectory | None, on_wait: OnWait | None) -> list[TensorFile]:
        """Publish the checkpoint, and return its files, open."""
        if like is not None:
            # Before the weights: a directory with weights is complete.
            like.copy_companions(os.path.dirname(self._path))
        written = [(shard.file, shard.contents) for shard in shards if shard.file is not None]
        if len(shards) == 1:
            publish_file(written[0][0])
        else:
            publish_shards(written, self._path)
        return [
            TensorFile(file.path, descriptor=file.duplicate(), contents=contents, shareable=True)
            for file, contents in written
        ]

    def abort(self) -> None:
        """Nothing is left: files that are closed before they are published are removed."""


def hidden_path(unfinished_in: str | None, shard: Shard) -> str | None:
    """Return where other processes open the file of a shard until it is complete."""
    return None if unfinished_in is None else os.path.join(unfinished_in, str(shard.number))


def start_file(file: AtomicFile, shard: Shard, *, is_shared: bool) -> AtomicFile:
    """Reserve the space of a shard in a new file, which other processes may write to, and write its header."""
    try:
        file.reserve(shard.size)
        file.write_at(shard.header, 0)
        if is_shared:
            # The page that has the end of the header must not be written again after another machine wrote to it.
            file.sync()
    except BaseException:
        file.close()
        raise
    return file


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
        index.write_at(index_text({name: tensors for name, (_, tensors) in zip(names, shards, strict=True)}), 0)
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


def index_text(files: Mapping[str, Mapping[str, StoredTensor]]) -> bytes:
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
