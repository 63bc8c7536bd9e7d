# SPDX-License-Identifier: Apache-2.0
"""The cost of opening and reading safetensors, single and sharded, compared with the safetensors library.

    python -m benchmarks.read_safetensors                 # 4 GiB as 500 tensors
    python -m benchmarks.read_safetensors --gib 1 --rounds 3

Opening is measured in a separate process for each reader, which has opened a small file before, so that imports do not
count. Bytes read are rchar of /proc/self/io, which does not include reads through a memory map. Reading is measured in
one process, in turns, from the page cache: every tensor once, into separate memory, summed up (so that every byte of it
is really used), and copied into an existing parameter (as in loading a model). The last is also measured from the disk,
after the file was dropped from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

import nvflare_lazy
from benchmarks.machine import describe_machine
from benchmarks.measuring import GIB, MIB, PeakMemory, in_turns, show_rates
from tests.measure import rchar

LAZY, MAPPED, PREAD = "nvflare-lazy", "safe_open", "safe_open, pread"
Get = Callable[[str], torch.Tensor]


@contextmanager
def opened(reader: str, path: Path) -> Iterator[tuple[list[str], Get]]:
    """Open a checkpoint and lend its names and a way to get a tensor."""
    if reader == LAZY:
        tensors = nvflare_lazy.open(path)
        yield list(tensors), tensors.__getitem__
        return
    options = {"backend": "pread"} if reader == PREAD else {}
    with safe_open(path, "pt", **options) as file:
        yield list(file.keys()), file.get_tensor


def own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in memory that nothing else shares."""
    return tensor.clone()


def measure(reader: str, path: Path, small: Path) -> dict[str, float]:
    """Open a file, then read one tensor of it."""
    with opened(reader, small) as (names, get):
        own(get(names[0]))
    before, start = rchar(), time.perf_counter()
    with PeakMemory() as memory, opened(reader, path) as (names, get):
        result = {"open ms": (time.perf_counter() - start) * 1e3, "open read KiB": (rchar() - before) / 1024}
        before = rchar()
        loaded = own(get(names[len(names) // 2]))
        result["one tensor, read beyond its bytes KiB"] = (rchar() - before - loaded.nbytes) / 1024
        own_bytes = loaded.nbytes
    result["RssAnon MiB beyond the tensor"] = (memory.growth - own_bytes) / MIB
    return result


def read_all(reader: str, path: Path, use: Callable[[str, torch.Tensor], object]) -> None:
    """Read every tensor once."""
    with opened(reader, path) as (names, get):
        for name in names:
            use(name, get(name))


def let_go_of(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--tensors", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", help="where to write the file that is read; it should fit into the page cache")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        reader, path, small = options.measure
        print(json.dumps(measure(reader, Path(path), Path(small))))
        return
    print("\n".join(f"{name}: {value}" for name, value in describe_machine().items()))
    numel = int(options.gib * GIB) // 4 // options.tensors
    nbytes = 4 * numel * options.tensors
    print(f"{options.gib:g} GiB as {options.tensors} tensors of {4 * numel / MIB:.1f} MiB\n")
    with tempfile.TemporaryDirectory(prefix="nvflare_lazy_bench_", dir=options.directory) as folder:
        single, sharded, small = Path(folder, "m.safetensors"), Path(folder, "sharded"), Path(folder, "small")
        sharded.mkdir()
        one = torch.randn(numel)
        tensors = {f"layer.{index}.weight": one for index in range(options.tensors)}
        nvflare_lazy.save(tensors, single)
        nvflare_lazy.save({"a": torch.ones(2)}, small)
        nvflare_lazy.save(tensors, sharded, max_shard_size=nbytes // 8)
        for name, path, readers in (
            ("one file", single, (LAZY, MAPPED, PREAD)),
            ("8 shards and an index", sharded, (LAZY,)),
        ):
            for reader in readers:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.read_safetensors",
                    "--measure",
                    reader,
                    str(path),
                    str(small),
                ]
                found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                print(f"{name}, {reader}: " + ", ".join(f"{what} {value:.1f}" for what, value in found.items()))
        parameters = dict.fromkeys(tensors, torch.empty(numel))
        uses: dict[str, Callable[[str, torch.Tensor], object]] = {
            "into memory of its own": lambda name, tensor: own(tensor),
            "summed up": lambda name, tensor: tensor.sum(),
            "copied into a parameter": lambda name, tensor: parameters[name].copy_(tensor),
        }
        for what, use in uses.items():
            print(f"\nevery tensor once, {what}:")
            rivals = {
                reader: lambda reader=reader, use=use: read_all(reader, single, use) for reader in (LAZY, MAPPED, PREAD)
            }
            show_rates(in_turns(rivals, options.rounds), nbytes, MAPPED)
        print("\nevery tensor once, copied into a parameter, from the disk:")
        show_rates(in_turns(rivals, options.rounds, before=lambda: let_go_of(single)), nbytes, MAPPED)


if __name__ == "__main__":
    main()
