# SPDX-License-Identifier: Apache-2.0
"""The architecture document lists every module with what its docstring says."""

from __future__ import annotations

from tests.documents.architecture import PACKAGE, documented_tables, module_tables


def test_every_module_has_its_line():
    """The document has the current docstring of every module, moved and new ones included."""
    assert documented_tables().strip() == module_tables().strip(), "run: python -m tests.documents.architecture"


def test_all_packages_are_listed():
    """A new package gets a section: the tables together have as many rows as there are modules."""
    rows = [line for line in documented_tables().splitlines() if line.startswith("| `")]
    assert len(rows) == len(list(PACKAGE.rglob("*.py")))
