# SPDX-License-Identifier: Apache-2.0
"""A program that saves checkpoints over others again and again, killed a little later each time.

Usage: python -m tests.formats.killed_saves DIRECTORY. Prints one line of JSON for each kill: what the checkpoint
contains then, and which files are in the directory after another save.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import nvflare_lazy
from nvflare_lazy.formats import save

CALLS = ("fsync", "link", "open", "pwrite", "replace", "unlink")
NAME = "model.safetensors"
BEFORE = ("nothing", "single", "sharded", "sharded otherwise", "plain shards", "plain files")
AFTER = ("single", "sharded")


def write(kind: str, directory: Path, version: int) -> None:
    """Save version 0 (before) or 1 (after) of a checkpoint, as one file, as shards, or not at all."""
    tensors = {name: torch.full((4,), float(version)) for name in ("a", "b", "c")}
    if kind == "single":
        save(tensors, directory / NAME)
    elif kind.startswith("sharded"):
        save(tensors, directory / NAME, max_shard_size=32 if kind == "sharded" else 16)
    elif kind == "plain shards":
        for number, name in enumerate(tensors, start=1):
            save_file({name: tensors[name]}, directory / f"model-{number:05d}-of-00003.safetensors")
    elif kind == "plain files":
        for name in tensors:
            save_file({name: tensors[name]}, directory / f"{name}.safetensors")
    else:
        assert kind == "nothing"


def found(path: Path) -> str:
    """Return which version a path opens as."""
    try:
        opened = nvflare_lazy.open(path)
        versions = {value for tensor in opened.values() for value in tensor.tolist()}
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    if set(opened) != {"a", "b", "c"} or len(versions) != 1:
        return f"half: {sorted(opened)} {versions}"
    return "new" if versions == {1.0} else "old"


@contextlib.contextmanager
def killed_at(place: int) -> Iterator[None]:
    """Send this process SIGKILL before or after the given system call."""
    calls = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            for step in (lambda: None, lambda: real(*args, **kwargs)):
                result = step()
                if calls == place:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls += 1
            return result

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    yield


def watch(directory: Path, before: str, after: str) -> Iterator[dict[str, Any]]:
    """Kill a save of `after` over `before` at each system call, and yield the state found afterwards."""
    for place in range(10_000):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        write(before, directory, 0)
        child = os.fork()
        if not child:
            with killed_at(place):
                write(after, directory, 1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        hidden = [name for name in os.listdir(directory) if name.startswith(".")]
        result = {"killed": os.WIFSIGNALED(status), "directory": found(directory), "path": found(directory / NAME)}
        write(after, directory, 1)
        yield {**result, "then": found(directory), "files": sorted(os.listdir(directory)), "hidden": hidden}
        if not result["killed"]:
            return


def main() -> None:
    """Try every pair."""
    # What the kernel was told stays told when a process dies: only a power failure needs the disk, and has no test.
    os.fsync = lambda fd: None
    for before in BEFORE:
        for after in AFTER:
            for result in watch(Path(sys.argv[1]), before, after):
                print(json.dumps({"before": before, "after": after, **result}))


if __name__ == "__main__":
    main()
