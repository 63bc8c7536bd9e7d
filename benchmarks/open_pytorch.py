# SPDX-License-Identifier: Apache-2.0
"""The cost of opening a PyTorch checkpoint, kind by kind, compared with `torch.load`.

    python -m benchmarks.open_pytorch                       # 4 GiB as 500 tensors: zip, legacy, tar
    python -m benchmarks.open_pytorch --gib 1 --kinds zip

Each reader is a separate process that has opened a small file of the kind before, so that imports do not count.
Anonymous memory is RssAnon, bytes read are rchar of /proc/self/io, which does not include reads through a memory map.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.machine import describe_machine
from nvflare_lazy.formats.pytorch import open_pytorch
from tests.measure import rchar, rss_anon

MIB = 1 << 20
READERS = {"zip": ("nvflare-lazy", "torch mmap"), "legacy": ("nvflare-lazy", "torch"), "tar": ("nvflare-lazy",)}


def make(kind: str, path: Path, count: int, numel: int) -> None:
    """Write a checkpoint of zeros, which take no memory, and then something else over them."""
    if kind == "tar":
        make_tar(path, count, numel)
    else:
        content = {f"layer.{index}.weight": torch.zeros(numel) for index in range(count)}
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    noise = os.urandom(min(4 * numel, 4 * MIB))
    with path.open("r+b") as file:
        for entry in open_pytorch(path).entries.values():
            _, offset = entry.source.file_range()
            for start in range(0, 4 * numel, len(noise)):
                os.pwrite(file.fileno(), noise[: 4 * numel - start], offset + start)


def make_tar(path: Path, count: int, numel: int) -> None:
    """Write the oldest kind, which current torch cannot write, with holes instead of tensors."""
    rows = [pickle.dumps((index, "cpu", torch.FloatStorage), 2) + struct.pack("<q", numel) for index in range(count)]
    tensors = [pickle.dumps(count, 2)]
    names = []
    for index in range(count):
        number = count + index
        tensors.append(pickle.dumps((number, index, torch.FloatTensor), 2) + struct.pack("<iiqqq", 1, 0, numel, 1, 0))
        # A key, and the number of its tensor as a persistent id.
        names.append(b"".join(pickle.dumps(text, 2)[2:-1] for text in (f"layer.{index}.weight", str(number))) + b"Q")
    members = {"tensors": b"".join(tensors), "pickle": b"\x80\x02}(" + b"".join(names) + b"u."}
    first, last = pickle.dumps(count, 2), pickle.dumps([], 2)
    with path.open("wb") as file:
        for name, data in members.items():
            file.write(_header(name, len(data)) + data + bytes(-len(data) % 512))
        size = len(first) + sum(len(row) + 4 * numel for row in rows) + len(last)
        file.write(_header("storages", size) + first)
        for row in rows:
            file.write(row)
            file.seek(4 * numel, 1)
        file.write(last + bytes(-size % 512 + 1024))


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT)


def opened(reader: str, path: Path) -> tuple[Mapping[str, torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """Return a checkpoint's tensors and a way to copy one of them to separate memory."""
    if reader == "nvflare-lazy":
        return open_pytorch(path), lambda tensor: tensor.materialize()
    return torch.load(path, mmap=reader == "torch mmap", weights_only=True), torch.Tensor.clone


def measure(reader: str, path: Path, small: Path) -> dict[str, float]:
    """Open a file, read one tensor, read all of them one after the other."""
    warm, read = opened(reader, small)
    read(next(iter(warm.values())))
    del warm
    memory, before, start = rss_anon(), rchar(), time.perf_counter()
    tensors, read = opened(reader, path)
    result = {"open ms": (time.perf_counter() - start) * 1e3, "open read KiB": (rchar() - before) / 1024}
    result["open RssAnon MiB"] = (rss_anon() - memory) / MIB
    one = list(tensors)[len(tensors) // 2]
    before = rchar()
    loaded = read(tensors[one])
    result["one tensor: bytes read / its bytes"] = (rchar() - before) / loaded.nbytes
    del loaded
    start, total = time.perf_counter(), 0
    for tensor in tensors.values():
        total += read(tensor).nbytes
    result["read all GiB/s"] = total / (time.perf_counter() - start) / (1 << 30)
    result["then RssAnon MiB"] = (rss_anon() - memory) / MIB
    return result


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--tensors", type=int, default=500)
    parser.add_argument("--kinds", nargs="+", default=list(READERS), choices=list(READERS))
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        reader, path, small = options.measure
        print(json.dumps(measure(reader, Path(path), Path(small))))
        return
    print("\n".join(f"{name}: {value}" for name, value in describe_machine().items()))
    numel = int(options.gib * (1 << 30)) // 4 // options.tensors
    print(f"{options.gib:g} GiB as {options.tensors} tensors of {4 * numel / MIB:.1f} MiB\n")
    with tempfile.TemporaryDirectory(prefix="nvflare_lazy_bench_") as folder:
        path, small = Path(folder, "large.pt"), Path(folder, "small.pt")
        for kind in options.kinds:
            make(kind, small, 2, 16)
            make(kind, path, options.tensors, numel)
            for reader in READERS[kind]:
                command = [sys.executable, "-m", "benchmarks.open_pytorch", "--measure", reader, str(path), str(small)]
                found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                print(f"{kind}, {reader}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
            path.unlink()


if __name__ == "__main__":
    main()
