# SPDX-License-Identifier: Apache-2.0
"""The time of `nvflare-lazy diff`, next to plain reads of both files.

    python -m benchmarks.compare                  # two models of 4 GiB, float32
    python -m benchmarks.compare --dtype bf16 --gib 2 --rounds 3
    python -m benchmarks.compare --change unrelated

Plain reads use as many threads as `diff`, one buffer of 4 MiB in each, and discard the bytes. Both run in turns: from
the page cache, and from the disk after the page cache has dropped both files. Almost every element is different: by
noise of a hundredth of the standard deviation, as in training (some signs differ), by 1 %, or in an unrelated model.
A host that caches the disk of a virtual machine reads faster than its disk.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import nvflare_lazy
from benchmarks.machine import describe_machine
from benchmarks.measuring import GIB, MIB, FullPageCache, PeakMemory, in_turns, show_rates
from benchmarks.read_safetensors import let_go_of
from nvflare_lazy._system import available_cores
from nvflare_lazy.aggregation.comparison import compare
from nvflare_lazy.tensors.dtypes import by_spelling

_BUFFER_BYTES = 4 * MIB
PLAIN = "plain reads"


def read_plainly(paths: list[Path]) -> None:
    """Read files completely, several parts at a time."""
    ranges = [(path, at) for path in paths for at in range(0, path.stat().st_size, 16 * _BUFFER_BYTES)]
    files = {path: os.open(path, os.O_RDONLY) for path in paths}

    def read(part: tuple[Path, int]) -> None:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        for offset in range(part[1], part[1] + 16 * _BUFFER_BYTES, _BUFFER_BYTES):
            os.preadv(files[part[0]], (buffer,), offset)

    try:
        with ThreadPoolExecutor(available_cores()) as pool:
            list(pool.map(read, ranges))
    finally:
        for number in files.values():
            os.close(number)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="size of each model")
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--change", choices=("noise", "scale", "unrelated"), default="noise", help="model b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="where to write the two models")
    options = parser.parse_args()
    kind = by_spelling(options.dtype)
    if kind is None or kind.torch is None:
        parser.error(f"unknown --dtype {options.dtype!r}")
    print("\n".join(f"{name}: {value}" for name, value in describe_machine().items()))
    numel = int(options.gib * GIB) // kind.torch.itemsize // options.tensors
    values, others = (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    changed = {"noise": values + 0.01 * others, "scale": values * 1.01, "unrelated": others}[options.change]
    nbytes = 2 * numel * kind.torch.itemsize * options.tensors
    print(
        f"two models of {options.gib:g} GiB, {options.tensors} tensors of {kind.name} each, change: {options.change}\n"
    )
    with tempfile.TemporaryDirectory(prefix="nvflare_lazy_bench_", dir=options.directory) as folder:
        paths = [Path(folder, name) for name in ("a.safetensors", "b.safetensors")]
        for path, model in zip(paths, (values, changed), strict=True):
            one = model.to(kind.torch)
            nvflare_lazy.save({f"layer.{index}.weight": one for index in range(options.tensors)}, path)
        a, b = map(nvflare_lazy.open, paths)
        for origin in ("page cache", "disk"):
            with PeakMemory() as memory:
                assert not compare(a, b).same
            print(f"RssAnon of a comparison from the {origin}: {memory.growth / MIB:.0f} MiB")
            for path in paths:
                let_go_of(path)
        rivals = {"nvflare-lazy diff": lambda: compare(a, b), PLAIN: lambda: read_plainly(paths)}

        with FullPageCache(nbytes, Path(folder)) as page_cache:

            def make_cold() -> None:
                for path in paths:
                    let_go_of(path)
                page_cache.refill()

            print("\nfrom the disk:")
            show_rates(in_turns(rivals, options.rounds, before=make_cold), nbytes, PLAIN)
        read_plainly(paths)
        print("from the page cache:")
        show_rates(in_turns(rivals, options.rounds), nbytes, PLAIN)


if __name__ == "__main__":
    main()
