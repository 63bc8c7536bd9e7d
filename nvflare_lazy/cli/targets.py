# SPDX-License-Identifier: Apache-2.0
"""Where a command writes a checkpoint, and that nothing is replaced which nobody asked to have replaced."""

from __future__ import annotations

import os
from pathlib import Path

import click

from nvflare_lazy.cli.wording import printable


def free_target(path: str, what: str, *, force: bool) -> str:
    """Return the file that a checkpoint is to be called as a whole, or refuse.

    Args:
        path: A file that is called so, or a directory.
        what: What the argument is called.
        force: Whether a checkpoint that is there may be replaced.
    """
    from nvflare_lazy.formats.shard_names import index_of, parse_shard_name, stem_of

    if os.path.isdir(path):
        path = os.path.join(path, "model.safetensors")
    elif not path.endswith(".safetensors"):
        raise click.UsageError(f"{what} is a directory or ends in .safetensors, which {path!r} does not.")
    if force:
        return path
    directory = os.path.dirname(path)
    names = os.listdir(directory or ".")
    shards = {name for name in names if (shard := parse_shard_name(name)) and shard.stem == stem_of(path)}
    taken = sorted(shards.union(names) & {os.path.basename(path), os.path.basename(index_of(path)), *shards})
    if taken:
        raise click.ClickException(f"{printable(os.path.join(directory, taken[0]))} exists; --force replaces it")
    return path


def shown(saved: Path, target: str) -> str:
    """Return the path of a saved checkpoint as it is best told to whoever asked for `target`."""
    beside = os.path.join(os.path.dirname(target), saved.name)
    # Through a symbolic link it went elsewhere.
    return beside if os.path.realpath(beside) == os.path.realpath(saved) else str(saved)
