# SPDX-License-Identifier: Apache-2.0
"""Runs the main benchmark, or one by its name: `make bench`, `make bench ARGS="read_safetensors --gib 1"`.

`make bench ARGS=list` lists them.
"""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

_MAIN = "federated"


def runnable() -> dict[str, str]:
    """Return the benchmarks by name, each with the first line of its docstring."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        text = path.read_text()
        if '__name__ == "__main__"' in text:
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


def main() -> int:
    """Run what the command line names."""
    names = runnable()
    sys.argv = sys.argv[1:] or [_MAIN]
    if sys.argv[0] in names:
        runpy.run_module(f"benchmarks.{sys.argv[0]}", run_name="__main__", alter_sys=True)
        return 0
    print('Name one, with its options: make bench ARGS="NAME --help"\n')
    for name, about in names.items():
        print(f"  {name:18} {about}")
    return 0 if sys.argv == ["list"] else 2


if __name__ == "__main__":
    sys.exit(main())
