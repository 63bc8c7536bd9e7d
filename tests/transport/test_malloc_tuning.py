# SPDX-License-Identifier: Apache-2.0
"""Giving free memory back: not before there is too much of it, and not again and again when it is in use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nvflare_lazy.transport import malloc_tuning as malloc_tuning
from nvflare_lazy.transport.malloc_tuning import MallocTrimmer

MIB = 1 << 20


class Process:
    """A process of a certain size, most of which trimming may give back."""

    def __init__(self):
        self.used = self.size = 100 * MIB
        self.trims = 0
        self.told = []

    def trim(self):
        self.trims += 1
        self.size = self.used


@pytest.fixture
def process(monkeypatch):
    process = Process()
    monkeypatch.setattr(malloc_tuning, "anonymous_bytes", lambda: process.size)
    monkeypatch.setattr(malloc_tuning, "_trim", process.trim)
    monkeypatch.setattr(malloc_tuning, "_set_mallopt", process.told.append)
    return process


def test_too_much(process):
    """Memory is given back when the process has grown by more than it has room for, and not before."""
    memory = MallocTrimmer(64 * MIB, "stream")
    process.size = 164 * MIB
    memory.trim_excess()
    assert process.trims == 0
    process.size += 1
    memory.trim_excess()
    memory.trim_excess()
    assert process.trims == 1


def test_in_use(process):
    """What is in use is not asked for each time somebody looks."""
    memory = MallocTrimmer(64 * MIB, "stream")
    process.used = process.size = 200 * MIB
    for _ in range(10):
        memory.trim_excess()
    assert process.trims == 1
    process.size += 17 * MIB
    memory.trim_excess()
    assert process.trims == 2


def test_rest(process):
    """Between rounds everything is given back, and the process may grow from where it was least, not from there."""
    memory = MallocTrimmer(64 * MIB, "stream")
    process.used, process.size = 150 * MIB, 160 * MIB
    memory.trim_idle()
    assert (process.trims, process.size) == (1, 150 * MIB)
    process.size = 164 * MIB
    memory.trim_excess()
    assert process.trims == 1
    process.size += 1
    memory.trim_excess()
    assert process.trims == 2


def test_settings(process, monkeypatch):
    """When there was too much, the C library keeps less for a moment; without that, nothing changes."""
    memory = MallocTrimmer(64 * MIB, "stream")
    memory.trim_excess()
    memory.trim_idle()
    assert process.told == []
    process.size = 165 * MIB
    memory.trim_excess()
    memory.trim_excess()
    assert process.told == [malloc_tuning._STRICT_SETTINGS]
    monkeypatch.setattr(malloc_tuning, "_STRICT_SECONDS", -1)
    memory.trim_excess()
    memory.trim_excess()
    assert process.told == [malloc_tuning._STRICT_SETTINGS, malloc_tuning._SETTINGS["stream"]]
    process.size = 165 * MIB
    memory.trim_excess()
    memory.trim_idle()
    assert process.told == [malloc_tuning._STRICT_SETTINGS, malloc_tuning._SETTINGS["stream"]] * 2


TRAINING = """
import resource, sys, torch
from nvflare_lazy.transport.malloc_tuning import tune_malloc
for purpose in sys.argv[1:]:
    tune_malloc(purpose)
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
    """A step with activations of 8 MiB faults in no more memory than without settings, even after those of a server."""
    faults = []
    for purposes in ((), ("stream", "train")):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", TRAINING, *purposes]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        faults.append(int(done.stdout))
    without, with_settings = faults
    assert with_settings <= 1.1 * without
