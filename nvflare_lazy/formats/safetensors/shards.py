# SPDX-License-Identifier: Apache-2.0
"""The files of one checkpoint: `model.safetensors`, or its shards and the index that names them.

Writing and opening agree on which files of a directory count, which makes a sharded save atomic:

- A file `model.safetensors` counts before an index `model.safetensors.index.json`.
- With an index, only the shards it names count.
- Shards of a later generation (`model-00001-of-00003.g2.safetensors`) never count without an index.

An index is untrusted, so the names in it must not lead out of its directory. A symbolic link in the directory is
followed: the owner of the directory made it, and the cache of Hugging Face consists of links.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import (
    MissingShardError,
    RemoteError,
    SafetensorsError,
    ShardError,
    ShardIndexError,
    UnknownFormatError,
)
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.formats.safetensors._strict_json import JsonCursor
from nvflare_lazy.remote import open_file
from nvflare_lazy.remote.url import child, display, is_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from nvflare_lazy.tensors.entry import TensorEntry
    from nvflare_lazy.tensors.tensor_file import OpenFile


SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
WEIGHT_MAP = "weight_map"
# Of a trillion parameters in two hundred thousand tensors it is a fifth of this.
_MAX_INDEX_BYTES = 100_000_000
# What else a directory may hold that can be opened, but not by naming the directory.
OTHER_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".tar")

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5,})-of-(?P<of>\d{5,})(?:\.g(?P<generation>\d+))?\.safetensors", re.S)


class ShardName(NamedTuple):
    """The parts of a shard's name."""

    stem: str
    number: int
    of: int
    generation: int = 1

    def __str__(self) -> str:
        generation = f".g{self.generation}" if self.generation > 1 else ""
        return f"{self.stem}-{self.number:05d}-of-{self.of:05d}{generation}{SUFFIX}"


def parse_shard_name(name: str) -> ShardName | None:
    """Parse the name of a file. Return None if it is not the name of a shard."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return None
    return ShardName(match["stem"], int(match["number"]), int(match["of"]), int(match["generation"] or 1))


def shard_stem(path: str) -> str:
    """Return the common start of the names of a checkpoint's shards."""
    name = os.path.basename(path)
    return name[: -len(SUFFIX)] if name.endswith(SUFFIX) else name


def index_path(path: str) -> str:
    """Return the path of the index of the sharded checkpoint `path`."""
    return path + INDEX_SUFFIX


def in_directory(directory: str, name: str) -> str:
    """Return the path or the URL of a file in a directory."""
    return child(directory, name) if is_url(directory) else os.path.join(directory, name)


def read_weight_map(file: OpenFile) -> dict[str, str]:
    """Return the name of the file that each tensor is in, from the index of a checkpoint."""
    where = file.path
    if file.size > _MAX_INDEX_BYTES:
        raise ShardIndexError(f"{where} is not an index: it has {file.size} bytes")
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
        raise ShardIndexError(f"{error}; this is not an index of a sharded checkpoint") from error
    if weight_map is None:
        raise ShardIndexError(f"{where} has no {WEIGHT_MAP!r}: it is not an index of a sharded checkpoint")
    return weight_map


def is_index(path: str) -> bool:
    """Whether a file is the index of a checkpoint."""
    try:
        return bool(read_weight_map(open_file(path)))
    except (OSError, ShardIndexError):
        return False


def open_index(file: OpenFile, open_shard: Callable[[str], LazyTensorDict]) -> LazyTensorDict:
    """Open the checkpoint that an index describes; `open_shard` opens a file of its directory by name."""
    weight_map = read_weight_map(file)
    shards = {}
    for shard in sorted(set(weight_map.values())):
        try:
            shards[shard] = open_shard(shard)
        except FileNotFoundError:
            raise MissingShardError(f"{file.path} names {quoted(shard)}, which is missing: fetch it") from None
        except RemoteError:
            raise
        except OSError as error:
            raise ShardError(f"{file.path} names {quoted(shard)}, which cannot be opened: {error.strerror}") from error
    entries: dict[str, TensorEntry] = {}
    for name, shard in weight_map.items():
        entry = shards[shard].entries.get(name)
        if entry is None:
            raise MissingShardError(
                f"{file.path} says that tensor {quoted(name)} is in {quoted(shard)}, but it is not: "
                "index and shards are not of the same checkpoint"
            )
        entries[name] = entry
    return LazyTensorDict.from_entries(entries, metadata=common_metadata(shard.metadata for shard in shards.values()))


def common_metadata(metadata: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the metadata of several files without the keys that differ between them."""
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
            f"{where} names the file {quoted(name)}; an index may only name files in the same directory, without a path"
        )
    return name


def open_directory(directory: str, listed: Iterable[str], open_name: Callable[[str], LazyTensorDict]) -> LazyTensorDict:
    """Open the checkpoint in a directory.

    Args:
        directory: The directory, or its URL.
        listed: The names of the files in it.
        open_name: Opens a file of it, or an index, by name.
    """
    names = sorted(name for name in listed if not name.startswith("."))
    files = {name for name in names if name.endswith(SUFFIX)}
    indexes = _indexes(directory, names, files)
    superseded = {name for name in indexes if name[: -len(INDEX_SUFFIX)] in files}
    counting = [name for name in indexes if name not in superseded]
    if superseded:
        counting += [name[: -len(INDEX_SUFFIX)] for name in superseded]
    if len(counting) > 1:
        raise ShardError(
            f"{display(directory)} holds more than one checkpoint ({', '.join(counting)}): name the one to open"
        )
    if counting:
        return open_name(counting[0])
    shards = _without_index(directory, sorted(files))
    if not shards:
        _raise_no_checkpoint(directory, names)
    return _open_all(directory, shards, open_name)


def _indexes(directory: str, names: list[str], files: set[str]) -> list[str]:
    """Return the indexes that may count: of PyTorch files only where there is nothing of safetensors."""
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    foreign = [name for name in indexes if name[: -len(INDEX_SUFFIX)].endswith(OTHER_SUFFIXES)]
    own = [
        name
        for name in indexes
        if name not in foreign
        # Other software uses this suffix for other indexes.
        and (name.endswith(SUFFIX + INDEX_SUFFIX) or is_index(in_directory(directory, name)))
    ]
    return own if own or files else foreign


def _without_index(directory: str, files: list[str]) -> list[str]:
    """Return the files that count without an index: single files, and complete sets of shards."""
    stems = {shard_stem(name) for name in files}
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
                f"{display(directory)} has {len(present)} of {of} shards of {stem!r}; "
                f"{missing[0]} is the first that is missing"
            )
    return counting


def _missing(of: int, present: dict[int, str]) -> list[int]:
    # The number is part of an untrusted file name, and may be huge.
    return [number for number in range(1, min(of, len(present) + 1) + 1) if number not in present]


def _open_all(directory: str, files: list[str], open_name: Callable[[str], LazyTensorDict]) -> LazyTensorDict:
    entries: dict[str, TensorEntry] = {}
    home: dict[str, str] = {}
    opened = []
    for name in files:
        shard = open_name(name)
        opened.append(shard.metadata)
        for tensor, entry in shard.entries.items():
            if tensor in home:
                raise ShardError(
                    f"{display(directory)}: tensor {tensor!r} is in {home[tensor]} and in {name}: name the file to open"
                )
            home[tensor] = name
            entries[tensor] = entry
    return LazyTensorDict.from_entries(entries, metadata=common_metadata(opened))


def _raise_no_checkpoint(directory: str, names: list[str]) -> NoReturn:
    other = [name for name in names if name.endswith(OTHER_SUFFIXES)]
    if "saved_model.pb" in names:
        found = "a TensorFlow SavedModel: export its weights to safetensors first"
    elif other:
        found = f"no safetensors files; name the file to open, for example {display(in_directory(directory, other[0]))}"
    elif names:
        found = f"{len(names)} files, none of which is called *{SUFFIX} or *{INDEX_SUFFIX}"
    else:
        found = "nothing"
    raise UnknownFormatError(f"{display(directory)} is not a checkpoint: the directory contains {found}")
