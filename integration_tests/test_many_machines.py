# SPDX-License-Identifier: Apache-2.0
"""The example with clusters on one machine: the same bytes with each engine, and nothing is left after Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.fl_job.simulator import end_tree
from tests.documents.markdown import blocks
from tests.documents.session import matches

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "many_machines"
MIB = 64
NEEDS = {"processes": [], "dask": ["distributed"], "ray": ["ray"]}
engines = pytest.mark.parametrize(
    "engine",
    [
        pytest.param(name, marks=pytest.mark.skipif(not all(map(find_spec, needs)), reason=f"needs {needs}"))
        for name, needs in NEEDS.items()
    ],
)


class Example:
    """The running example, whose output is in a file."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.log = directory / "output.txt"
        self.directory = directory
        # The name of the directory is in the command lines or the environments of all processes.
        with open(self.log, "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(EXAMPLE / "run.py"), *arguments, "--workspace", str(directory / "work")],
                env={**os.environ, "PYTHONPATH": str(ROOT), "MANY_MACHINES": str(directory)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Example:
        return self

    def __exit__(self, *error: object) -> None:
        end_tree(self.process)

    def wait_for(self, text: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def left(self) -> list[str]:
        """Return the command lines of processes that the example has started and that still run."""
        mark, found = f"MANY_MACHINES={self.directory}".encode(), []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found


@engines
@pytest.mark.parametrize("store", ["s3", "files"])
def test_the_same_bytes_with_each_engine(engine: str, store: str, tmp_path: Path) -> None:
    """The output has the form that the README shows, and the driver holds no results."""
    [session] = [block for block in blocks(EXAMPLE / "README.md") if block.language == "console"]
    expected = session.text.partition("\n")[2].replace("processes ", f"{engine} ")
    if store == "files":
        expected = expected.replace("s3://federation", "...")
    with Example(tmp_path, "--engine", engine, "--store", store, "--mib", str(MIB)) as example:
        assert example.process.wait(400) == 0, example.log.read_text()
        output = example.log.read_text()
        assert matches(_masked(expected), _masked(output)), output
        one, several = re.findall(r"^.* ([\d.]+) s  driver \+(\d+) MiB  sha256 (\w+)$", output, re.MULTILINE)
        assert one[2] == several[2]
        assert int(several[1]) < MIB
        assert example.left() == []


@engines
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_an_interruption(engine: str, number: signal.Signals, tmp_path: Path) -> None:
    """Also while the cluster works: no process, and no unfinished result."""
    with Example(tmp_path, "--engine", engine, "--store", "files", "--mib", "512", "--rule", "median") as example:
        example.wait_for("one process ")
        work = tmp_path / "work"
        deadline = time.monotonic() + 200
        while not is_aggregating(work):
            assert example.process.poll() is None, example.log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        example.process.send_signal(number)
        assert example.process.wait(100) == 128 + number, example.log.read_text()
        # A worker of Ray ends by itself when its node is gone.
        deadline = time.monotonic() + 20
        while example.left() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert example.left() == []
        assert not [*work.rglob("*.parts")]
        assert not (work / "store" / engine / "model.safetensors.index.json").exists()


def is_aggregating(work: Path) -> bool:
    """Whether workers write files of the result."""
    return any(path.parent.suffix == ".parts" and path.name != "session" for path in (work / "store").rglob("*"))


def _masked(text: str) -> str:
    return re.sub(r"[ \t]+", " ", re.sub(r"sha256 \w+|\d+(?:\.\d+)?", "0", text))
