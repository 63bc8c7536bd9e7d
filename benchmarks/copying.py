# SPDX-License-Identifier: Apache-2.0
"""From file to file: through a buffer of some size, or by the kernel. What decided how tiles are copied.

    python -m benchmarks.copying --directory /where/checkpoints/are

From the page cache to the page cache, without waiting for the disk.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.machine import describe_machine
from benchmarks.measuring import MIB, in_turns, show_rates

MOST = 1 << 30


def through_buffer(nbytes: int) -> Callable[[int, int, int], None]:
    """Return a way to copy through a buffer of this size."""
    buffer = memoryview(bytearray(nbytes))

    def copy(source: int, target: int, size: int) -> None:
        for offset in range(0, size, nbytes):
            count = os.preadv(source, [buffer], offset)
            os.pwrite(target, buffer[:count], offset)

    return copy


def by_copy_file_range(source: int, target: int, size: int) -> None:
    """Let the kernel copy, or the file system share the blocks."""
    done = 0
    while done < size:
        done += os.copy_file_range(source, target, min(MOST, size - done), done, done)


def by_sendfile(source: int, target: int, size: int) -> None:
    """Let the kernel pass pages from one file to the other."""
    done = 0
    while done < size:
        done += os.sendfile(target, source, done, min(MOST, size - done))


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="where to write")
    options = parser.parse_args()
    print("\n".join(f"{name}: {value}" for name, value in describe_machine().items()))
    size = options.mib * MIB
    with tempfile.TemporaryDirectory(prefix="nvflare_lazy_bench_", dir=options.directory) as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        with source.open("wb") as file:
            for _ in range(options.mib):
                file.write(os.urandom(MIB))

        def run(copy: Callable[[int, int, int], None]) -> None:
            with source.open("rb") as from_file, target.open("wb") as to_file:
                copy(from_file.fileno(), to_file.fileno(), size)

        def clear() -> None:
            target.unlink(missing_ok=True)
            os.sync()

        ways = {f"buffer of {kib} KiB": through_buffer(kib << 10) for kib in (64, 256, 1024, 4096, 16384)}
        ways |= {"copy_file_range": by_copy_file_range, "sendfile": by_sendfile}
        rivals = {name: lambda way=way: run(way) for name, way in ways.items()}
        show_rates(in_turns(rivals, options.rounds, clear), size, "copy_file_range")


if __name__ == "__main__":
    main()
