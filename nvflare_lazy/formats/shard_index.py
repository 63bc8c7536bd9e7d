# SPDX-License-Identifier: Apache-2.0
"""The index of a sharded checkpoint: which file each tensor is in.

Opened like one file. An index comes from wherever the checkpoint came from, so the names in it may not lead out of
its directory; a symbolic link in the directory is followed, since whoever owns the directory made it (the cache of
Hugging Face consists of them).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import MissingShardError, SafetensorsError, ShardError, ShardIndexError
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.formats.strict_json import JsonCursor
from nvflare_lazy.tensors.tensor_file import TensorFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from nvflare_lazy.tensors.entry import TensorEntry

WEIGHT_MAP = "weight_map"
# Of a trillion parameters in two hundred thousand tensors it is a fifth of this.
_MOST_INDEX_BYTES = 100_000_000


def read_weight_map(file: TensorFile) -> dict[str, str]:
    """Return the name of the file that each tensor is in, from the index of a checkpoint."""
    where = file.path
    if file.size > _MOST_INDEX_BYTES:
        raise ShardIndexError(f"{where} is no index: it has {file.size} bytes")
    text = bytearray(file.size)
    file.read_into(memoryview(text), 0)
    cursor = JsonCursor(text, where)
    weight_map: dict[str, str] | None = None
    try:
        for key in cursor.members():
            if key == WEIGHT_MAP:
                weight_map = {name: _shard(cursor.string(), where) for name in cursor.members()}
            else:
                cursor.skip()
    except SafetensorsError as error:
        raise ShardIndexError(f"{error}; this is no index of a sharded checkpoint") from error
    if weight_map is None:
        raise ShardIndexError(f"{where} has no {WEIGHT_MAP!r}: it is no index of a sharded checkpoint")
    return weight_map


def is_index(path: str) -> bool:
    """Whether a file is the index of a checkpoint."""
    try:
        return bool(read_weight_map(TensorFile(path)))
    except (OSError, ShardIndexError):
        return False


def open_index(file: TensorFile, open_shard: Callable[[str], LazyTensorDict]) -> LazyTensorDict:
    """Open the checkpoint that an index describes.

    Args:
        file: The index.
        open_shard: Opens one of its files.
    """
    weight_map = read_weight_map(file)
    directory = os.path.dirname(file.path)
    shards = {}
    for shard in sorted(set(weight_map.values())):
        try:
            shards[shard] = open_shard(os.path.join(directory, shard))
        except FileNotFoundError:
            raise MissingShardError(f"{file.path} names {quoted(shard)}, which is not there: fetch it, too") from None
    entries: dict[str, TensorEntry] = {}
    for name, shard in weight_map.items():
        entry = shards[shard].entries.get(name)
        if entry is None:
            raise MissingShardError(
                f"{file.path} says that tensor {quoted(name)} is in {quoted(shard)}, but it is not: "
                "index and shards are not of the same checkpoint"
            )
        entries[name] = entry
    return LazyTensorDict.from_entries(entries, metadata=agreed(shard.metadata for shard in shards.values()))


def agreed(metadata: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the metadata of several files as that of one: what no two of them disagree on."""
    found: dict[str, str] = {}
    disputed = set()
    for of_one in metadata:
        for key, value in of_one.items():
            if found.setdefault(key, value) != value:
                disputed.add(key)
    return {key: value for key, value in found.items() if key not in disputed}


def _shard(name: str, where: str) -> str:
    if os.path.basename(name) != name or name in ("", ".", "..") or "\\" in name or "\0" in name:
        raise ShardError(
            f"{where} names the file {quoted(name)}; an index may only name files of its own directory, without a path"
        )
    return name
