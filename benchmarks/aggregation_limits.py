# SPDX-License-Identifier: Apache-2.0
"""The minimum time of an aggregation on a machine: reading, arithmetic and writing, alone and together.

Plain loops in Python threads without the other work of the engine: names, weights, checks, provenance and exact
rounding. `benchmarks.aggregate` compares the engine with them in the same run.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from nvflare_lazy.aggregation.rules._sorting_network import sorting_network
from nvflare_lazy.formats.atomic_file import AtomicFile
from nvflare_lazy.tensors.tensor_memory import storage_bytes

MIB = 1 << 20
_PAGE = mmap.PAGESIZE
_SEQUENTIAL_BYTES = 8 * MIB


class Arithmetic(ABC):
    """The computation of one thread on pieces of `count` elements from each of `contributors`."""

    #: Bytes of a piece of one contribution.
    piece_bytes = MIB

    def __init__(self, contributors: int, count: int, dtype: torch.dtype) -> None:
        self.values = torch.zeros(count, dtype=dtype)

    def buffer(self, number: int) -> torch.Tensor:
        """Return the tensor to read the piece of a contribution into."""
        return self.values

    @abstractmethod
    def add(self, number: int) -> None:
        """Process the piece of a contribution, which has been read."""

    @abstractmethod
    def finish(self) -> torch.Tensor:
        """Return the result."""


class NoArithmetic(Arithmetic):
    """Reads and writes only."""

    def add(self, number: int) -> None:
        pass

    def finish(self) -> torch.Tensor:
        return self.values


class Sum(Arithmetic):
    """The unweighted sum in float64, rounded to the type of the contributions in any way."""

    def __init__(self, contributors: int, count: int, dtype: torch.dtype) -> None:
        super().__init__(contributors, count, dtype)
        self._total, self._term = (torch.zeros(count, dtype=torch.float64) for _ in range(2))

    def add(self, number: int) -> None:
        if number == 0:
            self._total.copy_(self.values)
        else:
            self._total.add_(self._term.copy_(self.values))

    def finish(self) -> torch.Tensor:
        return self.values.copy_(self._total)


class Median(Arithmetic):
    """The lower median, by the minima and maxima of the sorting network; float32 only."""

    piece_bytes = MIB // 4

    def __init__(self, contributors: int, count: int, dtype: torch.dtype) -> None:
        super().__init__(contributors, count, dtype)
        self._wires = [torch.zeros(count, dtype=dtype) for _ in range(contributors)]

    def buffer(self, number: int) -> torch.Tensor:
        return self._wires[number]

    def add(self, number: int) -> None:
        pass

    def finish(self) -> torch.Tensor:
        wires, spare = [*self._wires], self.values
        middle = (len(wires) - 1) // 2
        for low, high, needs_low, needs_high in sorting_network(len(wires), middle, len(wires) // 2):
            if needs_low and needs_high:
                torch.minimum(wires[low], wires[high], out=spare)
                torch.maximum(wires[low], wires[high], out=wires[high])
                wires[low], spare = spare, wires[low]
            elif needs_low:
                torch.minimum(wires[low], wires[high], out=wires[low])
            else:
                torch.maximum(wires[low], wires[high], out=wires[high])
        return wires[middle]


def on_all_cores(work: Callable[[Iterator[int]], None], offsets: Sequence[int], threads: int) -> None:
    """Run `work` in threads that share the offsets; torch computes on one core in each."""
    pending, lock, started = iter(offsets), threading.Lock(), threading.Barrier(threads)

    def take() -> Iterator[int]:
        while True:
            with lock:
                offset = next(pending, None)
            if offset is None:
                return
            yield offset

    def run() -> None:
        torch.get_num_threads()
        torch.set_num_threads(1)
        # A thread that starts to compute before another has set its number would take two cores.
        started.wait()
        work(take())

    before = torch.get_num_threads()
    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.set_num_threads(before)


def read_compute_write(
    paths: Sequence[Path], nbytes: int, dtype: torch.dtype, arithmetic: type[Arithmetic], out: Path, threads: int
) -> None:
    """Read every contribution once with large reads, compute, and write the result to a file that has its room."""
    files = [os.open(path, os.O_RDONLY) for path in paths]
    with AtomicFile(out, fsync=False) as target:
        target.reserve(nbytes)
        with target.descriptor() as descriptor:

            def work(offsets: Iterator[int]) -> None:
                piece = arithmetic(len(files), arithmetic.piece_bytes // dtype.itemsize, dtype)
                buffers = [storage_bytes(piece.buffer(number)) for number in range(len(files))]
                for offset in offsets:
                    for number, (file, buffer) in enumerate(zip(files, buffers, strict=True)):
                        os.preadv(file, [buffer], offset)
                        piece.add(number)
                    os.pwrite(descriptor, storage_bytes(piece.finish())[: nbytes - offset], offset)

            on_all_cores(work, range(0, nbytes, arithmetic.piece_bytes), threads)
        target.publish()
    for file in files:
        os.close(file)


def compute(count: int, nbytes: int, dtype: torch.dtype, arithmetic: type[Arithmetic], threads: int) -> None:
    """Do the arithmetic alone, again and again on the same few pieces in memory."""

    def work(offsets: Iterator[int]) -> None:
        piece = arithmetic(count, arithmetic.piece_bytes // dtype.itemsize, dtype)
        for _ in offsets:
            for number in range(count):
                piece.add(number)
            piece.finish()

    on_all_cores(work, range(0, nbytes, arithmetic.piece_bytes), threads)


def read_once(paths: Sequence[Path], *, direct: bool) -> None:
    """Read the files one after the other, as `dd bs=8M` does, past the page cache (`iflag=direct`) or through it."""
    buffer = memoryview(mmap.mmap(-1, _SEQUENTIAL_BYTES))
    for path in paths:
        with _opened(path, os.O_DIRECT if direct else 0) as file:
            offset = 0
            while count := os.preadv(file, [buffer], offset):
                offset += count


def make_cold(paths: Sequence[Path]) -> None:
    """Remove files from the page cache; raise if the kernel keeps more than a hundredth of one."""
    for path in paths:
        with _opened(path) as file:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        if (cached := cached_bytes(path)) > path.stat().st_size // 100:
            raise RuntimeError(f"{path} is not cold: {cached} of its bytes are in the page cache")


def cached_bytes(path: Path) -> int:
    """Return how much of a file is in the page cache, by mincore."""
    with _opened(path) as file, mmap.mmap(file, 0, prot=mmap.PROT_READ) as memory:
        seen = np.zeros(-(-len(memory) // _PAGE), np.uint8)
        view = np.frombuffer(memory, np.uint8)
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
        failed = mincore(view.ctypes.data, len(memory), seen.ctypes.data)
        del view
        if failed:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
    return int((seen & 1).sum()) * _PAGE


@contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | flags)
    try:
        yield file
    finally:
        os.close(file)
