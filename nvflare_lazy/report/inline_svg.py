# SPDX-License-Identifier: Apache-2.0
"""Makes matplotlib's SVG a part of an HTML page: named for screen readers, and with colors that the page chooses.

Colors of the palette become variables of the page, and ids become unique in it.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_FONT = re.compile(r"font-family:[^;]*;?\s*|font: [^;]*?(?P<size>[\d.]+px)[^;]*;?\s*")
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_NUMBERS = ("d", "x", "y", "width", "height", "transform", "style")


def inline(document: str, name: str, title: str, description: str, palette: dict[str, str]) -> str:
    """Return an SVG document as an element of a page.

    Args:
        document: As matplotlib writes it.
        name: A name that is unique in the page.
        title: The accessible name.
        description: The accessible description.
        palette: The color of each variable.
    """
    # Written by matplotlib in this process: nothing in it expands.
    root = ElementTree.fromstring(document)  # noqa: S314
    for metadata in root.findall(f"{_SVG}metadata"):
        root.remove(metadata)
    for parent in root.iter():
        for styles in parent.findall(f"{_SVG}style"):
            parent.remove(styles)
    used = {value[1:] for element in root.iter() if (value := element.get(_LINK, "")).startswith("#")}
    used |= {
        match for element in root.iter() for value in element.attrib.values() for match in _REFERENCE.findall(value)
    }
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        _rename(element, name, used)
        for key, value in list(element.attrib.items()):
            element.set(key, _recolored(key, value, palette))
    root.attrib = {
        "viewBox": root.get("viewBox", ""),
        "role": "img",
        "aria-labelledby": f"{name}-t",
        "aria-describedby": f"{name}-d",
    }
    for index, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(tag, {"id": f"{name}-{tag[0]}"})
        element.text = text
        root.insert(index, element)
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)


def _rename(element: ElementTree.Element, name: str, used: set[str]) -> None:
    own = element.attrib.pop("id", None)
    if own in used:
        element.set("id", f"{name}-{own}")
    link = element.attrib.pop(_LINK, None)
    if link is not None:
        element.set("href", f"#{name}-{link[1:]}")
    for key, value in element.attrib.items():
        element.set(key, _REFERENCE.sub(rf"url(#{name}-\1)", value))


def _recolored(key: str, value: str, palette: dict[str, str]) -> str:
    if key in ("style", "fill", "stroke"):
        for variable, color in palette.items():
            value = value.replace(color, f"var(--{variable})")
        # The page has a font, and sizes stay.
        value = _FONT.sub(lambda match: f"font-size: {match['size']}; " if match["size"] else "", value)
        value = value.replace("#000000", "var(--ink)")
    if key in _NUMBERS:
        value = _LONG_NUMBER.sub(lambda match: f"{float(match[0]):.2f}", value)
    return " ".join(value.split())
