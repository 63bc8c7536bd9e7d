# SPDX-License-Identifier: Apache-2.0
"""Virtual environments with further packages, next to the packages of this one, and tests that run in them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def make_environment(directory: Path, *packages: str, unpinned: str = "") -> Path:
    """Make an environment and return its Python.

    Args:
        directory: Where the environment goes.
        packages: What to install, in the versions of `constraints.txt`.
        unpinned: A regular expression for names whose versions there do not count.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    python = directory / "bin" / "python"
    [site] = directory.glob("lib/python*/site-packages")
    (site / "this_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    if unpinned:
        pins = [line for line in pins if not re.match(f"({unpinned})==", line)]
    constraints = directory / "constraints.txt"
    constraints.write_text("\n".join(pins))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "-c", constraints]
    subprocess.run([*pip, *packages], check=True)
    return python


def run_slow_tests(python: Path, *paths: Path) -> None:
    """Run the slow tests of some modules in another environment."""
    run_tests(python, "-m", "slow", *paths)


def run_tests(python: Path, *arguments: str | Path) -> None:
    """Run pytest in another environment."""
    # The path of a socket in it must be short, and these tests have a long one for temporary files.
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            check=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TMPDIR": temporary,
                # Only the environment of these tests has the commands of the packages.
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            },
        )
