# SPDX-License-Identifier: Apache-2.0
"""Which files of a directory are the checkpoint in it: an index, one file, or shards that lie there without an index.

The reading side of the agreement in `shard_names`, by which a directory holds the old checkpoint or the new one at any
moment of a save.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING, NoReturn

from nvflare_lazy.errors import MissingShardError, ShardError, UnknownFormatError
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.formats.shard_index import agreed, is_index
from nvflare_lazy.formats.shard_names import INDEX_SUFFIX, SUFFIX, ShardName, parse_shard_name, stem_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvflare_lazy.tensors.entry import TensorEntry

# What else a directory may hold that can be opened, but not by naming the directory.
_OTHER_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".tar")


def open_directory(directory: str, open_file: Callable[[str], LazyTensorDict]) -> LazyTensorDict:
    """Open the checkpoint in a directory.

    Args:
        directory: The directory.
        open_file: Opens a file of it, or an index.
    """
    names = sorted(name for name in os.listdir(directory) if not name.startswith("."))
    files = {name for name in names if name.endswith(SUFFIX)}
    indexes = _indexes(directory, names, files)
    superseded = {name for name in indexes if name[: -len(INDEX_SUFFIX)] in files}
    counting = [name for name in indexes if name not in superseded]
    if superseded:
        counting += [name[: -len(INDEX_SUFFIX)] for name in superseded]
    if len(counting) > 1:
        raise ShardError(f"{directory} holds more than one checkpoint ({', '.join(counting)}): name the one to open")
    if counting:
        return open_file(os.path.join(directory, counting[0]))
    shards = _without_index(directory, sorted(files))
    if not shards:
        _explain_nothing(directory, names)
    return _open_all(directory, shards, open_file)


def _indexes(directory: str, names: list[str], files: set[str]) -> list[str]:
    """Return the indexes that may count: of PyTorch files only where there is nothing of safetensors."""
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    foreign = [name for name in indexes if name[: -len(INDEX_SUFFIX)].endswith(_OTHER_SUFFIXES)]
    own = [
        name
        for name in indexes
        if name not in foreign
        # Others call their files like this, too, whatever they are the index of.
        and (name.endswith(SUFFIX + INDEX_SUFFIX) or is_index(os.path.join(directory, name)))
    ]
    return own if own or files else foreign


def _without_index(directory: str, files: list[str]) -> list[str]:
    """Return the files that count where there is no index, complete sets of shards among them."""
    stems = {stem_of(name) for name in files}
    sets: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    counting = []
    for name in files:
        shard = parse_shard_name(name)
        if shard is not None and (shard.generation > 1 or shard.stem in stems):
            continue
        counting.append(name)
        if shard is not None:
            sets[shard.stem, shard.of][shard.number] = name
    for (stem, of), present in sets.items():
        missing = [str(ShardName(stem, number, of)) for number in _missing(of, present)]
        if missing:
            raise MissingShardError(
                f"{directory} has {len(present)} of {of} shards of {stem!r}; {missing[0]} is the first that is missing"
            )
    return counting


def _missing(of: int, present: dict[int, str]) -> list[int]:
    # The number comes from a file's name, and may be as large as anybody likes.
    return [number for number in range(1, min(of, len(present) + 1) + 1) if number not in present]


def _open_all(directory: str, files: list[str], open_file: Callable[[str], LazyTensorDict]) -> LazyTensorDict:
    entries: dict[str, TensorEntry] = {}
    home: dict[str, str] = {}
    opened = []
    for name in files:
        shard = open_file(os.path.join(directory, name))
        opened.append(shard.metadata)
        for tensor, entry in shard.entries.items():
            if tensor in home:
                raise ShardError(
                    f"{directory}: tensor {tensor!r} is in {home[tensor]} and in {name}: name the file to open"
                )
            home[tensor] = name
            entries[tensor] = entry
    return LazyTensorDict.from_entries(entries, metadata=agreed(opened))


def _explain_nothing(directory: str, names: list[str]) -> NoReturn:
    other = [name for name in names if name.endswith(_OTHER_SUFFIXES)]
    if "saved_model.pb" in names:
        found = "a TensorFlow SavedModel: export its weights to safetensors first"
    elif other:
        found = f"no safetensors files; name the file to open, for example {os.path.join(directory, other[0])}"
    elif names:
        found = f"{len(names)} files, none of which is called *{SUFFIX} or *{INDEX_SUFFIX}"
    else:
        found = "nothing"
    raise UnknownFormatError(f"{directory} is no checkpoint: the directory holds {found}")
