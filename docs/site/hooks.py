# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs: put the README and the files that pages link to on the site, and check the API reference.

The Markdown files link to each other as files of the repository, so that they can be read without the site.
"""

from __future__ import annotations

import inspect
import os
import posixpath
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# The README is the home page, and the index of the documents another one.
_RENAMED = {"README.md": "index.md", "docs/README.md": "documentation.md"}
_OTHER_FILES = "project/"
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
_FILE_COMMENT = re.compile(r"^( *)<!-- file: (\S+) -->\n\1(```\w+)$", re.MULTILINE)
_DOCTEST = re.compile(r"^( *```)python\n(?= *>>>)", re.MULTILINE)
_NOT_PROSE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)

_DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as home page, and every file outside docs/ that a page links to."""
    index = files.get_file_from_path("README.md")
    if index is not None:
        files.remove(index)
    wanted = [*_RENAMED, "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
    wanted += [_repository_path(file.src_uri) for file in files.documentation_pages()]
    seen: set[str] = set()
    while wanted:
        path = wanted.pop()
        if path in seen or not (ROOT / path).is_file():
            continue
        seen.add(path)
        uri = _site_path(path)
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=(ROOT / path).read_bytes()))
        if path.endswith(".md"):
            text = _NOT_PROSE.sub("", (ROOT / path).read_text(encoding="utf-8"))
            wanted += [_resolve(path, target) for target in _LINK.findall(text) if "://" not in target]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages, and name the file above a block of code."""
    origin = _repository_path(page.file.src_uri)

    def site_link(match: re.Match[str]) -> str:
        if "://" in match[0]:
            return match[0]
        target = _site_path(_resolve(origin, match[0]))
        return posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")

    code = iter([match[0] for match in _NOT_PROSE.finditer(markdown)])
    prose = _LINK.sub(site_link, _NOT_PROSE.sub("\0", markdown))
    markdown = re.sub("\0", lambda _: next(code), prose)
    markdown = _FILE_COMMENT.sub(r'\1\3 title="\2"', markdown)
    return _DOCTEST.sub(r"\1pycon\n", markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Raise if a public name is missing in the reference, or if a page loads something from the network."""
    pages = {path: path.read_text(encoding="utf-8") for path in Path(config.site_dir).rglob("*.html")}
    anchors = {anchor for text in pages.values() for anchor in re.findall(r' id="(nvflare_lazy[\w.]*)"', text)}
    missing = [name for module in documented_modules() for name in public_names(module) if name not in anchors]
    if missing:
        raise PluginError(f"undocumented public names: {', '.join(missing)}")
    loads = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"?(https?:)?//[^>]*>")
    remote = [f"{path}: {match[0]}" for path, text in pages.items() for match in loads.finditer(text)]
    if remote:
        raise PluginError(f"pages load from the network: {remote[:5]}")


def documented_modules() -> list[ModuleType]:
    """Return the modules that have a directive in the reference of the Python API."""
    pages = (ROOT / "docs" / "reference" / "api").glob("*.md")
    targets = {target for page in pages for target in _DIRECTIVE.findall(page.read_text(encoding="utf-8"))}
    return [import_module(target) for target in sorted(targets) if _is_module(target)]


def public_names(module: ModuleType) -> list[str]:
    """Return the full names of the objects that a module exports, except NVFlare's."""
    exported = getattr(module, "__all__", None)
    if exported is None:
        values = {
            name: value for name, value in vars(module).items() if inspect.isclass(value) or inspect.isroutine(value)
        }
        names = [name for name, value in values.items() if value.__module__ == module.__name__]
    else:
        names = [name for name in exported if not _is_of_nvflare(getattr(module, name))]
    return [f"{module.__name__}.{name}" for name in names if not name.startswith("_")]


def _is_of_nvflare(value: object) -> bool:
    return str(getattr(value, "__module__", "")).startswith("nvflare.")


def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def _site_path(path: str) -> str:
    if path in _RENAMED:
        return _RENAMED[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else _OTHER_FILES + path


def _repository_path(uri: str) -> str:
    renamed = {new: old for old, new in _RENAMED.items()}
    if uri in renamed:
        return renamed[uri]
    return uri.removeprefix(_OTHER_FILES) if uri.startswith(_OTHER_FILES) else f"docs/{uri}"


def _resolve(path: str, target: str) -> str:
    return os.path.normpath(posixpath.join(posixpath.dirname(path), target))
