# SPDX-License-Identifier: Apache-2.0
"""`python -m nvflare_lazy.flare.install SCRIPT ARGUMENTS`: runs a training script after `install()`.

For a job whose trainers are separate processes, and whose script does not call `install()` itself; also `-m MODULE
ARGUMENTS`, as for Python. Launchers that take a module, such as torchrun, take this one.
"""

from __future__ import annotations

import os
import runpy
import sys


def _run(arguments: list[str]) -> None:
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        # Python has added the current directory to the path, as it does for any module.
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif arguments and not arguments[0].startswith("-"):
        sys.argv = arguments
        # As Python does for a script: its directory is the first on the path.
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        sys.exit("usage: python -m nvflare_lazy.flare.install [-m MODULE | SCRIPT] [ARGUMENTS]")


# NVFlare imports every module of a package that is named in its `nvflare_decomposers`.
if __name__ == "__main__":
    _run(sys.argv[1:])
