# SPDX-License-Identifier: Apache-2.0
"""Tests that need transformers, in an environment for each of its generations, next to the packages of this one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LIBRARIES = Path(__file__).with_name("test_libraries.py")
JOBS = ROOT / "integration_tests" / "test_hugging_face.py"
#: What transformers 4 requires in other versions.
UNPINNED = re.compile(r"(transformers|tokenizers|huggingface_hub)==")


@pytest.mark.slow
@pytest.mark.parametrize("transformers", ["transformers", "transformers==4.57.*"])
def test_libraries(tmp_path, transformers):
    """All tests pass with the newest libraries and with the last transformers 4."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "this_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    if transformers != "transformers":
        pins = [line for line in pins if not UNPINNED.match(line)]
    (tmp_path / "constraints.txt").write_text("\n".join(pins))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "-c", tmp_path / "constraints.txt"]
    subprocess.run([*pip, transformers, "accelerate", "peft"], check=True)
    # The path of a socket in it must be short.
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow", LIBRARIES, JOBS],
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": temporary},
        )
