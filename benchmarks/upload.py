# SPDX-License-Identifier: Apache-2.0
"""The time of a save to a URL, compared with the plain upload of the same file by the client library.

    python -m benchmarks.upload                 # 1 GiB, to an S3-compatible server on loopback
    python -m benchmarks.upload --gib 0.25 --rounds 1

The server of the tests keeps the objects on the disk that `--directory` names. It takes a large part of the two
processors, because it computes the checksums of all parts. The checkpoint is read from another file. The file of the
plain upload exists already: nothing is written before it is sent.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import fsspec
import torch

import nvflare_lazy
from benchmarks.machine import describe_machine
from benchmarks.measuring import GIB, MIB, PeakMemory, in_turns, show_rates
from tests.remote.s3_on_disk import S3OnDisk


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", help="where to write")
    options = parser.parse_args()
    print("\n".join(f"{name}: {value}" for name, value in describe_machine().items()))
    numel = int(options.gib * GIB) // 64
    with tempfile.TemporaryDirectory(prefix="nvflare_lazy_bench_", dir=options.directory) as folder:
        server = S3OnDisk(Path(folder, "s3"))
        try:
            os.environ.update(server.environment, NVFLARE_LAZY_SCRATCH=folder)
            source = Path(folder, "source.safetensors")
            nvflare_lazy.save({f"{index:02d}": torch.ones(numel) for index in range(16)}, source)
            nbytes = source.stat().st_size
            lazy, fs = nvflare_lazy.open(source), fsspec.filesystem("s3")
            shard = nbytes // 8 + MIB

            def put() -> None:
                fs.put(str(source), "s3://bucket/plain.safetensors")

            def save() -> None:
                nvflare_lazy.save(lazy, "s3://bucket/one/model.safetensors")

            def save_shards() -> None:
                nvflare_lazy.save(lazy, "s3://bucket/eight/", max_shard_size=shard)

            with PeakMemory() as memory:
                save_shards()
            print(f"\n{options.gib:g} GiB; RssAnon grows by {memory.growth / MIB:.0f} MiB during a save in 8 shards\n")
            rivals = {"fs.put of a file": put, "save, one file": save, "save, 8 shards": save_shards}
            show_rates(in_turns(rivals, options.rounds), nbytes, "fs.put of a file")
            assert server.content("one/model.safetensors") == server.content("plain.safetensors")
        finally:
            server.kill()


if __name__ == "__main__":
    main()
