# SPDX-License-Identifier: Apache-2.0
"""The built wheel, which is what users get, rather than the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nvflare_lazy"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the source tree, without network."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT],
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    [path] = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files in a separate directory."""
    target = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run(installed: Path, code: str) -> str:
    """Run code against the unpacked wheel, from a directory that has no source tree in it."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed)},
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout.strip()


def test_holds_the_package_and_nothing_else(installed):
    """Every module of the source tree (an ignore rule can lose one), and no tests or benchmarks."""
    [info] = installed.glob("*.dist-info")
    assert {path.name for path in installed.iterdir()} == {"nvflare_lazy", info.name}
    assert _files(installed / "nvflare_lazy") == _files(PACKAGE)


def test_every_directory_of_the_package_is_a_package():
    """A forgotten `__init__.py` works from the source tree and for some tools, and not for others."""
    directories = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [path for path in directories if not (path / "__init__.py").exists()] == []


def test_carries_types_and_license(installed):
    """Type checkers look for py.typed, lawyers for the license."""
    assert (installed / "nvflare_lazy" / "py.typed").is_file()
    [license_file] = installed.glob("*.dist-info/licenses/LICENSE")
    assert license_file.read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_every_module_imports_from_the_wheel(installed):
    """No module needs a file that only the source tree has."""
    code = """if True:
        import importlib, pathlib, pkgutil
        import nvflare_lazy

        names = [module.name for module in pkgutil.walk_packages(nvflare_lazy.__path__, "nvflare_lazy.")]
        for name in names:
            if not name.endswith("__main__"):
                importlib.import_module(name)
        print(pathlib.Path(nvflare_lazy.__file__).parent)
    """
    assert Path(run(installed, code)) == installed / "nvflare_lazy"


def test_console_script_names_something_that_runs(installed):
    """What the entry point names exists in the wheel, and knows the version."""
    [entry_points] = installed.glob("*.dist-info/entry_points.txt")
    scripts = ConfigParser()
    scripts.read(entry_points)
    module, _, function = scripts["console_scripts"]["nvflare-lazy"].partition(":")
    code = f"import sys; from {module} import {function}; sys.argv[1:] = ['--version']; {function}()"
    assert entry_points.parent.name.removesuffix(".dist-info").split("-")[1] in run(installed, code)


def _files(directory: Path) -> set[str]:
    return {
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
