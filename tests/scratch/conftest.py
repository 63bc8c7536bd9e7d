# SPDX-License-Identifier: Apache-2.0
"""Scratch roots, jobs, small disks, and the directories that a killed process leaves."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nvflare_lazy.scratch import JobScratch
from nvflare_lazy.scratch._lease import OwnerRecord
from nvflare_lazy.scratch.root import resolve_root
from nvflare_lazy.tensors.tensor_file import FileSource, TensorFile

SMALL_DISK = 8 << 20


@pytest.fixture(autouse=True)
def _no_scratch_in_the_environment(monkeypatch):
    monkeypatch.delenv("NVFLARE_LAZY_SCRATCH", raising=False)


@pytest.fixture
def root(tmp_path) -> Path:
    """Where a scratch root may be made."""
    return tmp_path / "scratch"


@pytest.fixture
def job(root) -> Iterator[JobScratch]:
    """A job's scratch, without a quota."""
    with JobScratch.open(root, job="job", min_free=0) as job:
        yield job


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of eight MiB, where this user may mount one; test_disk_full.py covers a full disk without it."""
    place = tmp_path / "disk"
    place.mkdir()
    options = f"size={SMALL_DISK},mode=0700,uid={os.geteuid()},gid={os.getegid()}"
    for become in ([], ["sudo", "-n"]):
        try:
            subprocess.run([*become, "mount", "-t", "tmpfs", "-o", options, "none", place], check=True, stderr=-1)
        except (OSError, subprocess.CalledProcessError):
            continue
        yield place
        subprocess.run([*become, "umount", place], check=True)
        return
    pytest.skip("this user may not mount a file system")


@pytest.fixture
def leave_behind(root) -> Callable[..., Path]:
    """Maker of directories that a killed process leaves; arguments change the owner record."""

    def make(name: str = "0" * 16, **changes) -> Path:
        directory = resolve_root(root) / f"job-{name}"
        (directory / "download").mkdir(parents=True)
        (directory / "download" / "00001.safetensors").write_bytes(bytes(1000))
        record = replace(OwnerRecord.for_this_process("lost"), **({"started": 1} | changes))
        directory.with_suffix(".lease").write_bytes(record.to_json())
        return directory

    return make


class Child:
    """A separate process that runs a script, reports each step, and waits for permission to continue."""

    def __init__(self, script: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def says(self) -> str:
        """Wait for the next line it prints."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait()} instead of saying something"
        return line.rstrip("\n")

    def go_on(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self, signal: int) -> None:
        """Kill it, and wait until it is dead."""
        self.process.send_signal(signal)
        self.process.wait()

    def ends(self) -> int:
        """Let it run to its end; return its exit code."""
        assert self.process.stdin
        self.process.stdin.close()
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            pipe.close()


@pytest.fixture
def start_child() -> Iterator[Callable[..., Child]]:
    """Starter of processes that end with the test."""
    children = []

    def start(script: str, *arguments: object) -> Child:
        children.append(Child(script, *arguments))
        return children[-1]

    yield start
    for child in children:
        child.close()


def write_without_end(file, block: bytes) -> None:
    """Append until something stops it."""
    for number in itertools.count():
        file.pwrite(block, number * len(block))


def written(job: JobScratch, data: bytes) -> TensorFile:
    """A finished file in a separate download, which it keeps."""
    file = job.download().new_file()
    file.pwrite(data, 0)
    return file.finish()


def show(job: JobScratch, file: TensorFile) -> str:
    """Show a file to other processes; return its id."""
    with file.descriptor() as fd:
        return job.rendezvous().show(fd)


def bytes_of(file: TensorFile) -> bytes:
    """Everything in an open file."""
    return bytes(FileSource(file, 0, file.size).read())


def names(directory: Path) -> list[str]:
    """Everything in a directory, by name."""
    return sorted(os.listdir(directory))


def wait_until_empty(root: Path) -> None:
    """Wait until another process has removed what a killed process left in a scratch root."""
    deadline = time.monotonic() + 120
    while names(root) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert names(root) == []
