# SPDX-License-Identifier: Apache-2.0
"""Aggregation on the processes of an MPI program, as `mpi4py.futures` starts it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nvflare_lazy.aggregation import Aggregation
from tests.aggregation.test_executors import hidden, make_contributions

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from pathlib import Path

import nvflare_lazy
from nvflare_lazy.aggregation import Aggregation

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    contributions = {path.stem: nvflare_lazy.open(path) for path in directory.glob("site-*")}
    executor = {"name": "mpi4py.futures.MPIPoolExecutor"}
    for rule in ("mean", "krum"):
        aggregation = Aggregation(rule, executor=executor, part_size="100KiB")
        aggregation.run(contributions, directory / f"{rule}-mpi.safetensors")
"""


def test_same_bytes(tmp_path: Path) -> None:
    """Two workers of `mpiexec` compute the bytes of one process, also for a rule with two passes."""
    mpiexec = shutil.which("mpiexec")
    # In another process, since the import initializes MPI.
    if (
        mpiexec is None
        or subprocess.run([sys.executable, "-c", "import mpi4py.MPI"], stderr=subprocess.DEVNULL).returncode
    ):
        pytest.skip("mpi4py or MPI is not installed")
    contributions = make_contributions(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    subprocess.run(
        [mpiexec, "-n", "3", sys.executable, "-m", "mpi4py.futures", str(program), str(tmp_path)],
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    for rule in ("mean", "krum"):
        Aggregation(rule).run(contributions, tmp_path / "one.safetensors")
        assert (tmp_path / f"{rule}-mpi.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()
    assert not hidden(tmp_path)
