# SPDX-License-Identifier: Apache-2.0
"""The tree of `docs/architecture.md`: one line per module, made from the module docstrings.

`python -m tests.documents.architecture` writes it into the document; a test compares the two.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "architecture.md"
PACKAGE = ROOT / "nvflare_lazy"
BEGIN, END = "<!-- modules: made by python -m tests.documents.architecture -->\n", "<!-- end of modules -->"
# In the order in which data passes them.
_ORDER = (
    "",
    "tensors",
    "remote",
    "formats",
    "scratch",
    "transport",
    "aggregation",
    "flare",
    "records",
    "report",
    "recipes",
    "cli",
)


def summary(path: Path) -> str:
    """Return the first sentence of a module's docstring, on one line and without its period."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if text is None:
        raise ValueError(f"{path} has no docstring")
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0].removesuffix(".")


def module_tables() -> str:
    """Return a table of modules for each package of the source tree."""
    parts = []
    for package in _ORDER:
        directory = PACKAGE / package
        parts.append(f"### {f'`{package}/`' if package else 'Top level'}\n\n| module | responsibility |\n|---|---|\n")
        paths = directory.rglob("*.py") if package else directory.glob("*.py")
        parts.extend(f"| `{_name(path, directory)}` | {summary(path)} |\n" for path in sorted(paths, key=_sort_key))
        parts.append("\n")
    return "".join(parts)


def documented_tables() -> str:
    """Return the part of the document between its two marks."""
    return DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def _name(path: Path, directory: Path) -> str:
    return path.relative_to(directory).with_suffix("").as_posix()


def _sort_key(path: Path) -> tuple[str, bool, str]:
    return path.parent.as_posix(), path.stem != "__init__", path.stem.lstrip("_")


def main() -> None:
    """Write the tables into the document."""
    before, begin, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{begin}\n{module_tables()}{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
