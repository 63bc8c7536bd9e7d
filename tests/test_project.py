# SPDX-License-Identifier: Apache-2.0
"""Facts in two files agree, and every source file names its license."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

import click
import pytest

import nvflare_lazy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SOURCE_DIRS = ("nvflare_lazy", "tests", "integration_tests", "benchmarks", "examples", "job_templates")
SPDX = "# SPDX-License-Identifier: Apache-2.0"


@pytest.fixture(scope="module")
def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_changelog_begins_with_the_version_of_the_project(pyproject):
    """A new version has an entry in the changelog."""
    newest = re.search(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert newest[1] == pyproject["project"]["version"]


def test_package_knows_its_version(pyproject):
    """`nvflare_lazy.__version__` is a literal, so that it costs nothing; it must not go stale."""
    assert nvflare_lazy.__version__ == pyproject["project"]["version"]


def test_every_source_file_begins_with_its_license():
    """The first line, or the second after a `#!`, is the SPDX line."""
    files = [path for name in SOURCE_DIRS for path in (ROOT / name).rglob("*.py")]
    assert files
    unlicensed = [path for path in files if SPDX not in _first_two_lines(path)]
    assert unlicensed == []


def test_every_public_method_is_documented():
    """The method or the method that it overrides has a docstring; ruff cannot check the latter."""
    undocumented = [
        f"{cls.__module__}.{cls.__qualname__}.{name}"
        for cls in _public_classes()
        for name, member in vars(cls).items()
        if not name.startswith("_")
        if callable(member) or isinstance(member, (property, staticmethod, classmethod))
        if not inspect.getdoc(getattr(cls, name))
    ]
    assert undocumented == []


def test_constraints_cover_what_the_package_depends_on(pyproject):
    """A dependency without a pin would make `make setup` install something else every month."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {_normalized(line) for line in lines if "==" in line}
    project = pyproject["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = {_normalized(line) for group in groups for line in group}
    assert wanted - pinned == set()


def _public_classes() -> Iterator[type]:
    for found in pkgutil.walk_packages(nvflare_lazy.__path__, "nvflare_lazy."):
        if found.name.endswith("__main__"):
            continue
        for name, cls in inspect.getmembers(importlib.import_module(found.name), inspect.isclass):
            if cls.__module__ == found.name and not name.startswith("_"):
                yield cls


def _first_two_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()[:2]


def _normalized(requirement: str) -> str:
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


#: Each has its own behavior after a fork, and a test of it: test_offload.py, scratch/test_processes.py,
#: tensors/test_processes.py (twice) and tensors/test_parallel_read.py.
PROCESS_WIDE_STATE = {
    "aggregation._distributed.parts._spare",
    "transport.offload.runtime",
    "scratch._cleanup_process.cleanup_process",
    "scratch._system._private",
    "tensors.entry._publishing",
    "tensors.lazy_tensor._loads",
    "tensors._parallel_read._helpers",
    "remote._reads._reader",
    "remote.url._file_systems",
}


def test_process_wide_state():
    """No module has objects that change while the process runs, except the ones in this list."""
    found = set()
    for path in sorted(ROOT.glob("nvflare_lazy/**/*.py")):
        if path.stem == "__main__":
            continue
        name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        assigned = {
            target.id
            for node in ast.parse(path.read_text()).body
            for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
            if isinstance(target, ast.Name)
        }
        module = importlib.import_module(name)
        for variable in assigned:
            value, path_of_it = getattr(module, variable, None), f"{name}.{variable}".removeprefix("nvflare_lazy.")
            # A container of the list may have content from a test before.
            filled = path_of_it in PROCESS_WIDE_STATE and isinstance(value, (set, dict, list))
            if filled or changes(value):
                found.add(path_of_it)
    assert found == PROCESS_WIDE_STATE


def changes(value: object) -> bool:
    """Whether an object has state: a lock, something per thread, an empty container, or our object with attributes."""
    if isinstance(value, (threading.local, type(threading.Lock()), type(threading.RLock()))):
        return True
    if isinstance(value, (set, dict, list)):
        return not value
    is_ours = type(value).__module__.startswith("nvflare_lazy.") and bool(getattr(value, "__dict__", None))
    return is_ours and not isinstance(value, (tuple, click.Command)) and not is_dataclass(value)


def test_no_cached_properties():
    """`functools.cached_property` makes a `__dict__`, which Python 3.11 may make twice if threads share the object.

    Two dictionaries then have the same memory, and the process crashes later, in the garbage collector.
    """
    files = (ROOT / "nvflare_lazy").rglob("*.py")
    assert not [path for path in files if "import cached_property" in path.read_text()]
