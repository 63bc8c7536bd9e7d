# SPDX-License-Identifier: Apache-2.0
"""`python -m nvflare_lazy.flare.install` runs a script or a module as Python does, after `install()`."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from nvflare_lazy.transport.registration import registered
if __name__ == "__main__":
    print(registered().complete, sys.argv[1:], sys.path[0])
"""


def run(folder, *arguments):
    command = [sys.executable, "-m", "nvflare_lazy.flare.install", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_scripts_and_modules(tmp_path):
    """With their arguments, and the first directory of Python's path; otherwise the error lists the requirements."""
    (tmp_path / "custom").mkdir()
    (tmp_path / "custom" / "program.py").write_text(PROGRAM)
    script = run(tmp_path, "custom/program.py", "-x", "1")
    assert script.stdout == f"True ['-x', '1'] {tmp_path / 'custom'}\n", script.stderr
    module = run(tmp_path / "custom", "-m", "program", "-x")
    assert module.stdout == f"True ['-x'] {tmp_path / 'custom'}\n", module.stderr
    nothing = run(tmp_path)
    assert nothing.returncode == 1
    assert nothing.stderr.startswith("usage: python -m nvflare_lazy.flare.install")
