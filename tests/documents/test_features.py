# SPDX-License-Identifier: Apache-2.0
"""The feature matrix names tests that exist and every recipe of the installed NVFlare."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nvflare
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "features.md").read_text()
PACKAGE = Path(nvflare.__file__).parent


def recipes() -> set[str]:
    """Every class whose bases lead to `Recipe`, read from the sources: many need libraries that are not here."""
    bases: dict[str, tuple[str, set[str]]] = {}
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text()
        if "Recipe" not in source:
            continue
        module = path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
        tree = ast.parse(source)
        imported = {
            alias.asname or alias.name: alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                bases[f"{module}.{node.name}"] = node.name, {imported.get(name, name) for name in names}
    found = {"Recipe"}
    while True:
        more = {name for name, of in bases.values() if of & found} - found
        if not more:
            return {path for path, (_, of) in bases.items() if of & found}
        found |= more


def test_every_recipe_is_in_the_matrix():
    """A recipe that a new release of NVFlare adds makes this fail until the matrix has a row for it."""
    rows = set(re.findall(r"^\| `([\w.]+Recipe\w*)` \|", PAGE, re.M))
    assert len(recipes()) > 20
    assert rows == recipes()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:integration_)?tests/[\w/]+\.py)(?:::|`)", PAGE))))
def test_every_test_exists(path):
    """The page may name a module or a function in it."""
    functions = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert functions >= set(re.findall(rf"`{re.escape(path)}::(\w+)`", PAGE))


def test_every_row_has_a_state():
    """Each feature is tested, untested, not tried, without effect or not possible, or has instructions."""
    states = re.findall(r"^\| .* \| (?:[\d, ]+(?:; counterpart)?|none) \| (.*) \|$", PAGE, re.M)
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and line.count(" | ") == 2]
    assert len(states) == len(rows) - PAGE.count("| levels | state |")
    words = "tested|untested|not tried|no effect|not possible|the job works|the same"
    assert [state for state in states if not re.match(words, state)] == []
