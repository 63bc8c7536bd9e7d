# SPDX-License-Identifier: Apache-2.0
"""Free memory is returned if it exceeds the limit, and memory in use is not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nvflare_lazy.transport import malloc_tuning
from nvflare_lazy.transport.malloc_tuning import MallocTrimmer

MIB = 1 << 20


class Process:
    """A process whose malloc keeps free memory: its size minus memory in use and memory of other allocators."""

    def __init__(self):
        self.used, self.outside, self.size = 60 * MIB, 40 * MIB, 100 * MIB
        self.trims = 0

    def trim(self):
        self.trims += 1
        self.size = self.used + self.outside


@pytest.fixture
def process(monkeypatch):
    process = Process()
    monkeypatch.setattr(malloc_tuning, "anonymous_bytes", lambda: process.size)
    monkeypatch.setattr(malloc_tuning, "_bytes_in_use", lambda: process.used)
    monkeypatch.setattr(malloc_tuning, "_trim", process.trim)
    return process


def test_too_much_free_memory(process):
    """Memory is returned if malloc keeps more free memory than the limit, and not before."""
    memory = MallocTrimmer(64 * MIB)
    process.size = 164 * MIB
    memory.trim_excess()
    assert process.trims == 0
    process.size += 1
    memory.trim_excess()
    memory.trim_excess()
    assert (process.trims, process.size) == (1, 100 * MIB)


def test_memory_in_use(process):
    """Memory in use is not free memory, and room for buffers grows with it."""
    memory = MallocTrimmer(64 * MIB)
    process.used, process.size = 2060 * MIB, 2150 * MIB
    memory.trim_excess()
    process.used = 1060 * MIB
    memory.trim_excess()
    process.size = 2164 * MIB
    memory.trim_excess()
    process.size = (2100 + 3 * 64) * MIB
    memory.trim_excess()
    assert process.trims == 0
    process.size += 1
    memory.trim_excess()
    assert process.trims == 1


def test_memory_of_other_allocators(process):
    """Memory that malloc does not know cannot be returned, so it is not tried each time."""
    memory = MallocTrimmer(64 * MIB)
    process.outside, process.size = 340 * MIB, 400 * MIB
    for _ in range(10):
        memory.trim_excess()
    assert process.trims == 1
    process.size += 17 * MIB
    memory.trim_excess()
    assert process.trims == 2


def test_ends_of_arenas(process, monkeypatch):
    """The C library returns the ends of its arenas for a few tensors, and keeps buffers again afterwards."""
    told = []
    monkeypatch.setattr(malloc_tuning, "_set_mallopt", told.append)
    memory = MallocTrimmer(64 * MIB)
    for _ in range(3):
        memory.trim_excess()
    assert told == []
    process.size = 165 * MIB
    for _ in range(10):
        memory.trim_excess()
    assert told == [(malloc_tuning._LOW_THRESHOLD,), malloc_tuning._SETTINGS]


def test_rest(process):
    """All free memory is returned between rounds."""
    memory = MallocTrimmer(64 * MIB)
    process.size = 160 * MIB
    memory.trim_idle()
    assert (process.trims, process.size) == (1, 100 * MIB)


BUFFERS = """
import ctypes, sys, threading
from nvflare_lazy._system import anonymous_bytes
from nvflare_lazy.transport.malloc_tuning import MallocTrimmer, tune_malloc
tune_malloc()
memory = MallocTrimmer(64 << 20)
idle = anonymous_bytes()

def receive(count):
    blocks = [bytearray(8 << 20) for _ in range(count)]
    for block in blocks:
        memoryview(block)[::4096] = bytes(2048)
    del blocks[1::2]
    grown.append(anonymous_bytes() - idle)

for count in (2, 40, 40):
    grown = []
    threads = [threading.Thread(target=receive, args=(count,)) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    memory.trim_excess()
    print((anonymous_bytes() - idle) >> 20)
"""


@pytest.mark.parametrize("preload", ["", "libjemalloc.so.2"], ids=["glibc", "jemalloc"])
def test_free_memory_of_a_process(preload):
    """The free memory of a process with many buffers is bounded, with glibc and with jemalloc."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "LD_PRELOAD": preload}
    done = subprocess.run([sys.executable, "-c", BUFFERS], env=environment, capture_output=True, text=True, check=True)
    if "cannot be preloaded" in done.stderr:
        pytest.skip(f"{preload} is not installed")
    assert all(int(grown) <= 96 for grown in done.stdout.split()), done.stdout


def test_settings_of_the_user(monkeypatch):
    """A setting in the environment takes precedence over that of the same name here."""
    told = {}
    monkeypatch.setattr(malloc_tuning, "_c_function", lambda name: told.__setitem__)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    malloc_tuning.tune_malloc()
    assert told == {malloc_tuning._M_ARENA_MAX: 2, malloc_tuning._M_TRIM_THRESHOLD: 64 * MIB}


TRAINING = """
import resource, sys, torch
from nvflare_lazy.transport.malloc_tuning import tune_malloc
if "tuned" in sys.argv:
    tune_malloc()
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 64))
batch = torch.randn(1024, 64)
for step in range(6):
    if step == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model(batch).square().mean().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_training():
    """A step with activations of 8 MiB faults in no more memory than without settings, or that of one activation."""
    faults = []
    for arguments in ((), ("tuned",)):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", TRAINING, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        faults.append(int(done.stdout))
    without, with_settings = faults
    steps, activation = 3, (8 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert with_settings <= max(1.1 * without, steps * activation)
