# SPDX-License-Identifier: Apache-2.0
"""Griffe reads what the docstrings of this project have and Google's style does not.

`Example:` is one example of `Examples:`, and a comment `#: …` above an attribute is its docstring.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Adapts docstrings before they are parsed."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub("Examples:", obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        if attr.docstring is not None or attr.lineno is None:
            return
        lines = attr.lines_collection[attr.filepath]
        comment = []
        for line in reversed(lines[: attr.lineno - 1]):
            if not line.strip().startswith("#: "):
                break
            comment.insert(0, line.strip().removeprefix("#: "))
        if comment:
            attr.docstring = griffe.Docstring(" ".join(comment), parent=attr, lineno=attr.lineno)
