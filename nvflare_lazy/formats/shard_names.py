# SPDX-License-Identifier: Apache-2.0
"""How the files of one checkpoint are called: `model.safetensors`, or its shards and the index that names them.

Shared by those who write checkpoints and those who open them, since what makes a sharded save atomic is an agreement
between the two: which of the files in a directory count.

- A file `model.safetensors` counts before an index `model.safetensors.index.json`.
- With an index, only what it names counts.
- Shards of a later generation (`model-00001-of-00003.g2.safetensors`) never count without an index.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5,})-of-(?P<of>\d{5,})(?:\.g(?P<generation>\d+))?\.safetensors", re.S)


class ShardName(NamedTuple):
    """What the name of a shard says."""

    stem: str
    number: int
    of: int
    generation: int = 1

    def __str__(self) -> str:
        generation = f".g{self.generation}" if self.generation > 1 else ""
        return f"{self.stem}-{self.number:05d}-of-{self.of:05d}{generation}{SUFFIX}"


def parse_shard_name(name: str) -> ShardName | None:
    """Return what the name of a file says, if it is a shard's."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return None
    return ShardName(match["stem"], int(match["number"]), int(match["of"]), int(match["generation"] or 1))


def stem_of(path: str) -> str:
    """Return what the names of a checkpoint's shards begin with."""
    name = os.path.basename(path)
    return name[: -len(SUFFIX)] if name.endswith(SUFFIX) else name


def index_of(path: str) -> str:
    """Return the path of the index of a sharded checkpoint that is called `path` as a whole."""
    return path + INDEX_SUFFIX
