# SPDX-License-Identifier: Apache-2.0
"""The cost of a streamed save of safetensors, compared with the safetensors library from memory.

    python -m benchmarks.save_safetensors                 # 2 GiB as 250 tensors
    python -m benchmarks.save_safetensors --gib 1 --rounds 3

The library has every tensor in memory before its clock starts; the lazy save reads them from another file. Both are
measured with and without waiting for the disk: where stated, the library's file and its directory are flushed, as a
lazy save always does. Peak memory is measured in a process that holds no tensors.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import nvflare_lazy
from benchmarks.machine import describe_machine
from benchmarks.measuring import GIB, MIB, PeakMemory, in_turns, show_rates
from nvflare_lazy.formats import collect_state_dict_meta, save_safetensors_streaming


def saved_by_library(tensors: Mapping[str, torch.Tensor], path: Path, *, flush: bool) -> None:
    """Save as the library does, and flush if asked to."""
    save_file(tensors, path)
    for place in (path, path.parent) if flush else ():
        fd = os.open(place, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def saved_by_us(tensors: Mapping[str, torch.Tensor], path: Path, *, flush: bool) -> None:
    """Save with `save`, or with the form of it that leaves flushing to others."""
    if flush:
        nvflare_lazy.save(tensors, path)
    else:
        meta = collect_state_dict_meta(tensors.items())
        os.replace(save_safetensors_streaming(tensors.items(), path, meta, rename=False), path)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--tensors", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="where to write")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        source, target = map(Path, options.measure)
        with PeakMemory() as memory:
            nvflare_lazy.save(nvflare_lazy.open(source), target)
        print(f"{memory.growth / MIB:.1f}")
        return
    print("\n".join(f"{name}: {value}" for name, value in describe_machine().items()))
    numel = int(options.gib * GIB) // 4 // options.tensors
    nbytes = 4 * numel * options.tensors
    print(f"{options.gib:g} GiB as {options.tensors} tensors of {4 * numel / MIB:.1f} MiB")
    with tempfile.TemporaryDirectory(prefix="nvflare_lazy_bench_", dir=options.directory) as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        nvflare_lazy.save({f"layer.{index}.weight": torch.randn(numel) for index in range(options.tensors)}, source)
        command = [sys.executable, "-m", "benchmarks.save_safetensors", "--measure", str(source), str(target)]
        grown = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        print(f"\nsaving the checkpoint anew from disk: RssAnon grows by {grown} MiB at most")

        def clear() -> None:
            target.unlink(missing_ok=True)
            os.sync()

        lazy, loaded = nvflare_lazy.open(source), {name: tensor.clone() for name, tensor in load_file(source).items()}
        for what, flush in (("without waiting for the disk", False), ("flushed to the disk", True)):
            print(f"\n{what}:")
            rivals = {
                "save_file from memory": lambda flush=flush: saved_by_library(loaded, target, flush=flush),
                "nvflare-lazy from another file": lambda flush=flush: saved_by_us(lazy, target, flush=flush),
                "nvflare-lazy from memory": lambda flush=flush: saved_by_us(loaded, target, flush=flush),
            }
            show_rates(in_turns(rivals, options.rounds, clear), nbytes, "save_file from memory")
        assert target.read_bytes() == source.read_bytes()


if __name__ == "__main__":
    main()
