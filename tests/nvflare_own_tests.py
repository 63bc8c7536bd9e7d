# SPDX-License-Identifier: Apache-2.0
"""Runs NVFlare's own unit tests without this package, with `install()`, and with NVFlare's names replaced by ours.

    python -m tests.nvflare_own_tests CLONE_OF_NVFLARE [-n 4] [tests/unit_test/PART ...]

Run it by hand before a new release of NVFlare is allowed: it takes some 20 minutes and prints the tests that fail only
with this package. Most failures are in tests that replace or inspect private functions; look at new ones. The other
arguments are pytest's. Needs pyhocon and parameterized, as NVFlare's tests do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
KINDS = ("stock", "install", "names")
#: The directories of its unit tests that can reach tensors, messages or jobs.
DIRECTORIES = (
    *("apis", "app_common", "app_opt", "client", "collab", "job_config", "private/fed", "recipe"),
    *("fuel/f3", "fuel/utils/fobs"),
)
#: For each module of NVFlare, our module with the same names, or single names.
ORIGINALS = {
    "nvflare.app_common.decomposers.numpy_decomposers": {
        "NumpyArrayDecomposer": "nvflare_lazy.transport.decomposers.LazyArrayDecomposer"
    },
    "nvflare.app_common.np.np_downloader": "nvflare_lazy.transport.array_downloader",
    "nvflare.app_opt.pt.decomposers": {"TensorDecomposer": "nvflare_lazy.transport.decomposers.LazyTensorDecomposer"},
    "nvflare.app_opt.pt.lazy_tensor_dict": "nvflare_lazy.formats.lazy_tensor_dict",
    "nvflare.app_opt.pt.tensor_downloader": "nvflare_lazy.transport.tensor_downloader",
    "nvflare.fuel.utils.fobs.decomposers.via_downloader": "nvflare_lazy.transport.via_downloader",
}


def replace_names() -> None:
    """Replace each class and function of NVFlare that has an equivalent here, in all of its modules."""
    from importlib import import_module
    from pkgutil import resolve_name

    ours: dict[int, Any] = {}
    keep = []
    for name, source in ORIGINALS.items():
        module = import_module(name)
        paths = source if isinstance(source, dict) else {}
        if isinstance(source, str):
            for key, value in vars(import_module(source)).items():
                if getattr(value, "__module__", "").startswith(("nvflare_lazy.", name)) and hasattr(module, key):
                    paths[key] = f"{source}.{key}"
        for key, path in paths.items():
            keep.append(getattr(module, key))
            ours[id(keep[-1])] = resolve_name(path)
    for name, module in list(sys.modules.items()):
        if name.startswith("nvflare."):
            for key, value in list(vars(module).items()):
                if id(value) in ours:
                    setattr(module, key, ours[id(value)])


def pytest_configure() -> None:
    """Replace the names, as a plugin of pytest."""
    if os.environ["NVFLARE_TESTS_WITH"] == "names":
        replace_names()


def pytest_runtest_setup() -> None:
    """Install before each test, since NVFlare's tests reset its registry."""
    if os.environ["NVFLARE_TESTS_WITH"] == "install":
        import nvflare_lazy

        nvflare_lazy.install()


def run(kind: str, copy: Path, arguments: list[str]) -> dict[str, str]:
    """Run the tests in one way and return the outcome of each."""
    report = copy / f"{kind}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", Path(__file__).stem]
    command += [f"--junitxml={report}", "--tb=short", "--continue-on-collection-errors", *arguments]
    path = os.pathsep.join([str(copy), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "NVFLARE_TESTS_WITH": kind, "PYTHONPATH": path}
    with open(copy / f"{kind}.txt", "w") as output:
        subprocess.run(command, cwd=copy, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = any(child.tag in ("failure", "error") for child in case)
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = "failed" if bad else "passed"
    return outcomes


def main() -> int:
    """Compare the three runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--only", choices=KINDS[1:], action="append", help="one of the two ways")
    parser.add_argument("--keep", type=Path, help="a new directory for the outputs")
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        copy = options.keep or Path(temporary) / "copy"
        # Without NVFlare itself: the installed one is tested.
        shutil.copytree(options.clone / "tests", copy / "tests")
        shutil.copy(options.clone / "pyproject.toml", copy)
        shutil.copy(__file__, copy)
        if not any(argument.startswith("tests/") for argument in arguments):
            arguments += [f"tests/unit_test/{directory}" for directory in DIRECTORIES]
        stock = run("stock", copy, arguments)
        print(f"stock: {list(stock.values()).count('failed')} of {len(stock)} failed", flush=True)
        new = 0
        for kind in options.only or KINDS[1:]:
            outcomes = run(kind, copy, arguments)
            failed = sorted(name for name, is_ in outcomes.items() if is_ == "failed" and stock.get(name) != "failed")
            new += len(failed)
            print(
                f"{kind}: {len(failed)} of {len(outcomes)} failed, and passed with stock",
                *failed,
                sep="\n  ",
                flush=True,
            )
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
