# SPDX-License-Identifier: Apache-2.0
"""Aggregates sharded checkpoints with the workers of a cluster, and compares the files with those of one process."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from clusters import ENGINES, STORES

import nvflare_lazy

MIB = 1 << 20
TENSOR_MIB = 4
NEEDS = {"ray": ["ray"], "dask": ["distributed"], "s3": ["moto", "s3fs"]}


@contextmanager
def watched() -> Iterator[list[int]]:
    """Measure the peak of the memory that this process has in addition, in bytes."""
    peak, over = [0], threading.Event()
    before = anonymous()

    def look() -> None:
        while not over.wait(0.02):
            peak[0] = max(peak[0], anonymous() - before)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def write_results(store: str, clients: int, mib: int) -> dict[str, str]:
    """Write the results of clients as sharded checkpoints, one tensor after the other; return where they are."""
    found = {}
    for number in range(1, clients + 1):
        generator = torch.Generator().manual_seed(number)
        tensors = {
            f"layer{index:03}": torch.randn(TENSOR_MIB * MIB // 4, generator=generator)
            for index in range(max(1, mib // TENSOR_MIB))
        }
        found[f"site-{number}"] = f"{store}/site-{number}/"
        nvflare_lazy.save(tensors, found[f"site-{number}"], max_shard_size=max(1, mib // 4) * MIB)
    return found


def digest(path: str) -> str:
    """Return the hash of all tensors of a checkpoint, in the order of their names."""
    sha = hashlib.sha256()
    tensors = nvflare_lazy.open(path)
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(tensors[name].numpy().tobytes())
    return sha.hexdigest()[:16]


def aggregate(results: dict[str, str], out: str, executor: dict[str, Any] | None, options: argparse.Namespace) -> str:
    """Aggregate, print a line, and return the hash of the model."""
    with watched() as peak:
        started = time.perf_counter()
        nvflare_lazy.aggregate(
            {name: nvflare_lazy.open(path) for name, path in results.items()},
            out,
            rule=options.rule,
            max_shard_size=max(1, options.mib // 4) * MIB,
            executor=executor,
        )
        seconds = time.perf_counter() - started
    name = "one process" if executor is None else options.engine
    found = digest(out)
    print(f"{name:12} {seconds:6.1f} s  driver +{peak[0] / MIB:.0f} MiB  sha256 {found}", flush=True)
    return found


def show(directory: Path, options: argparse.Namespace) -> int:
    # Shards are written to scratch before they are uploaded. Workers write parts of them, so they must share it.
    scratch = directory / "scratch"
    scratch.mkdir(mode=0o700, exist_ok=True)
    os.environ["NVFLARE_LAZY_SCRATCH"] = str(scratch)
    with STORES[options.store](directory) as store:
        results = write_results(store, options.clients, options.mib)
        print(f"{options.clients} results of {options.mib} MiB below {store}", flush=True)
        alone = aggregate(results, f"{store}/alone/", None, options)
        with ENGINES[options.engine](directory) as executor:
            together = aggregate(results, f"{store}/{options.engine}/", executor, options)
    print(f"the same bytes: {'yes' if alone == together else 'no'}")
    return 0 if alone == together else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="processes")
    parser.add_argument("--store", choices=STORES, default="s3", help="where the results and the models are")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--mib", type=int, default=128, help="size of a model")
    parser.add_argument("--rule", default="mean")
    parser.add_argument("--workspace", help="an empty directory; default: a temporary one, which is removed")
    options = parser.parse_args()
    needed = [*NEEDS.get(options.engine, []), *NEEDS.get(options.store, [])]
    missing = " ".join(name for name in needed if find_spec(name) is None)
    if missing:
        print(f"this example needs packages; install them with: pip install {missing}", file=sys.stderr)
        return 1
    # As with Ctrl-C, all blocks end the processes that they have started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if options.workspace:
            Path(options.workspace).mkdir(parents=True, exist_ok=True)
            return show(Path(options.workspace), options)
        with tempfile.TemporaryDirectory(prefix="many-machines-") as directory:
            return show(Path(directory), options)
    except KeyboardInterrupt:
        print("interrupted; the cluster and the store are gone", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
