# SPDX-License-Identifier: Apache-2.0
"""The reference matches the code: names, defaults, options and errors; words of the log and the targets of links."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TypeVar, get_args

import click
import pytest

import nvflare_lazy
from nvflare_lazy import aggregation, errors, flare, formats, recipes, scratch
from nvflare_lazy.aggregation.server_optimizers import _OPTIMIZERS
from nvflare_lazy.cli.program import program
from nvflare_lazy.flare.adaptation import component_mapping
from nvflare_lazy.records.schema import KINDS, Record
from nvflare_lazy.transport import (
    array_downloader,
    decomposers,
    failed,
    offload,
    registration,
    tensor_downloader,
    via_downloader,
)
from tests.documents.markdown import Block, blocks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
_Node = TypeVar("_Node", bound=ast.AST)
_HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)


def sections(page: str) -> dict[str, str]:
    """Return a page's text by heading, without the backticks and arguments a heading may have."""
    parts = _HEADING.split((DOCS / page).read_text(encoding="utf-8"))
    return {heading.replace("`", ""): text for heading, text in zip(parts[1::2], parts[2::2], strict=True)}


def rows(text: str) -> list[list[str]]:
    """Return the cells of all rows of the tables in a text, without the rows of headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    rule = [index for index, line in enumerate(lines) if set(line) <= set("|-")]
    return [row for index, row in enumerate(table) if not any(index in (at, at - 1) for at in rule)]


def words(cell: str) -> list[str]:
    """Return the text in backticks."""
    return re.findall(r"`([^`]*)`", cell)


def documented(text: str) -> dict[str, str]:
    """Return arguments and their defaults from the tables in a text."""
    return {words(row[0])[0]: words(row[1])[0] for row in rows(text) if len(row) == 3 and words(row[1])}


def taken(callable_: object) -> dict[str, str]:
    """Return arguments and their defaults from a signature."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(callable_).parameters.values()
    return {part.name: _written(part.default) for part in parameters if part.kind in named}


def _written(default: object) -> str:
    # An enumeration's own form names its value twice.
    return str(default) if type(default).__module__.startswith("nvflare.") else repr(default)


@pytest.mark.parametrize("name", flare.__all__)
def test_components(name):
    """Each component has a section with exactly the arguments its constructor takes, and their defaults."""
    assert documented(sections("reference/components.md")[name]) == taken(getattr(flare, name))


def test_records():
    """The records of a job are described field by field, each kind under its own heading."""
    described = sections("reference/records.md")
    own = {field.name for field in fields(Record)}
    assert {word for row in rows(described["Records of a job"]) for word in words(row[0])} == {"kind"} | own
    for name, kind in KINDS.items():
        found = [word for row in rows(described[name]) for word in words(row[0])]
        assert sorted(found) == sorted({field.name for field in fields(kind)} - own)


def test_server_optimizers():
    """The table has the optimizers there are, with their arguments and defaults."""
    described = {}
    for name, arguments, _ in rows(sections("reference/components.md")["Server optimizers"]):
        described[words(name)[0]] = dict(word.split("=") for word in words(arguments))
    there_are = {}
    for name, kind in _OPTIMIZERS.items():
        optimizer = kind()
        there_are[name] = {field.name: repr(getattr(optimizer, field.name)) for field in fields(optimizer)}
    assert described == there_are


@pytest.mark.parametrize("name", recipes.__all__)
def test_recipes(name):
    """Each recipe has a section with the arguments that NVFlare's lacks, or has with another default."""
    recipe = getattr(recipes, name)
    own = taken(recipe)
    bases = recipe.__mro__[1:] if inspect.isclass(recipe) else ()
    inherited = {argument: default for base in reversed(bases) for argument, default in taken(base).items()}
    expected = {argument: default for argument, default in own.items() if inherited.get(argument) != default}
    described = documented(sections("reference/recipes.md")[name])
    assert {argument: own[argument] for argument in described} == described
    assert expected.keys() - described.keys() <= {"recipe", "model"}


def test_mapping():
    """The table has every component of NVFlare that is replaced."""
    described = {word for row in rows(sections("reference/recipes.md")["The mapping"]) for word in words(row[0])}
    assert described == set(component_mapping._PACKAGES)


@pytest.mark.parametrize("name", program.list_commands(click.Context(program)))
def test_commands(name):
    """Each command has a section with its arguments in the heading and exactly its options in a table."""
    command = program.get_command(click.Context(program), name)
    by_heading = sections("reference/command-line.md")
    heading = next(heading for heading in by_heading if heading.startswith(f"nvflare-lazy {name}"))
    arguments = [part.metavar or part.name.upper() for part in command.params if isinstance(part, click.Argument)]
    assert heading.split()[2:] == arguments
    options = {option for part in command.params if isinstance(part, click.Option) for option in part.opts}
    assert {words(row[0])[0] for row in rows(by_heading[heading])} == options


API = {
    **{module.__name__: module for module in (nvflare_lazy, aggregation, errors, flare, formats, recipes, scratch)},
    **{
        module.__name__: module
        for module in (array_downloader, decomposers, failed, offload, registration, tensor_downloader, via_downloader)
    },
}


def directives() -> set[str]:
    """Return what the pages of the Python API document from docstrings."""
    pages = (DOCS / "reference" / "api").glob("*.md")
    return {name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.M)}


def test_every_public_module_has_its_directive():
    """The pages of the Python API document every public module, and nothing that does not exist."""
    assert set(API) <= directives()
    for name in directives() - set(API):
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute) or import_module(name), name


@pytest.mark.parametrize("module", API.values(), ids=API)
def test_public_names_have_docstrings(module):
    """What a public module exports has a docstring, from which its entry in the reference is made."""
    exported = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]
    values = {name: getattr(module, name) for name in exported if not name.startswith("_")}
    assert values
    own = {name: value for name, value in values.items() if isinstance(value, type) or inspect.isroutine(value)}
    assert [name for name, value in own.items() if not value.__doc__] == []


ORIGINAL_NAMES = {
    "nvflare_lazy.transport.tensor_downloader": (
        *("TensorDownloadable", "TensorConsumer", "DiskTensorConsumer", "LazyTensorDict", "add_tensors"),
        *("download_tensors", "download_tensors_to_disk", "cleanup_active_disk_tensor_downloads"),
    ),
    "nvflare_lazy.transport.via_downloader": (
        *("LazyDownloadRef", "LazyDownloadRefDecomposer", "clear_download_initiated", "was_download_initiated"),
    ),
    "nvflare_lazy.formats": (
        *("save_safetensors_streaming", "collect_state_dict_meta", "TensorMeta", "StateDictMeta", "StateDictMetaItem"),
        *("DTYPE_TO_SAFETENSORS", "DTYPE_ELEMENT_SIZE", "LazyDataSource", "ZipSource", "LegacyMultiStorageSource"),
    ),
}


def test_original_names():
    """Each original name is in one module, which the table names together with the differences."""
    modules = {words(row[1])[0] for row in rows(sections("reference/api/README.md")["Original names"])}
    assert modules == set(ORIGINAL_NAMES)
    for module, names in ORIGINAL_NAMES.items():
        assert [name for name in names if not hasattr(import_module(module), name)] == []


def test_errors():
    """Every error that a user can meet, and every rule of safetensors, is in the tables of troubleshooting."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+Error)`", text))
    made = {node.func.id for node in _nodes(ast.Call) if isinstance(node.func, ast.Name)}
    tree = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert {kind.__name__ for kind in _leaves(errors.NVFlareLazyError)} | (made & tree) <= named
    assert {name for name in named if not hasattr(errors, name)} == set()
    assert [rule for rule in get_args(errors.SafetensorsRule) if f"`{rule}`" not in text] == []


def test_log_lines():
    """Explained log lines exist: the text between `…` is in the source."""
    constants = {node.value for node in _nodes(ast.Constant) if isinstance(node.value, str)}
    table = rows(sections("troubleshooting.md")["Lines of the log"])
    for cell, meaning, _ in table:
        if "NVFlare's own" in meaning:
            continue
        for line in words(cell):
            for part in filter(None, line.split("…")):
                assert any(part in constant for constant in constants), f"{part!r} of `{line}` is in no message"


def test_fragments_of_configurations():
    """Names in a configuration of a document exist and accept these arguments, even where only a part is shown."""
    named = [part for page in PAGES for block in blocks(page) if block.language == "json" for part in _parts(block)]
    assert {"TensorOffload", "LazyAggregator", "LazyModelPersistor"} <= {path.rpartition(".")[2] for path, _ in named}
    for path, arguments in named:
        module, _, name = path.rpartition(".")
        inspect.signature(getattr(import_module(module), name)).bind_partial(**arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    """Links between documents lead somewhere: to a file, and to a heading if they name one."""
    prose = re.sub(r"^ *(```|~~~).*?^ *\1", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page}: {target}"
        if anchor:
            headings = _HEADING.findall(found.read_text(encoding="utf-8"))
            assert anchor in [_slug(heading) for heading in headings], f"{page}: {target}"


def test_index():
    """The index has every document below docs/."""
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    missing = [page for page in DOCS.rglob("*.md") if f"({page.relative_to(DOCS)})" not in index]
    assert missing == [DOCS / "README.md"]


def test_navigation_of_the_site():
    """The site has every document in its navigation; `make docs` fails otherwise."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}
    assert [page for page in sorted(pages) if f"- {page}\n" not in navigation] == []


def test_numbers_of_the_readme():
    """The table of the README has the medians of the committed results, rounded."""
    measured = {
        row[0]: row for row in rows(sections("results/README.md")["A deployment on one machine, external trainers"])
    }
    shown = {row[0].partition(":")[0]: row[1:] for row in rows((ROOT / "README.md").read_text()) if len(row) == 5}
    names = {"NVFlare 2.9": "NVFlare, in memory", **{f"level {n}": f"nvflare-lazy, level {n}" for n in (1, 2, 3)}}
    assert names.keys() <= shown.keys()
    for short, name in names.items():
        memory, seconds, processor, scratch = (cell.strip("*") for cell in shown[short])
        row = measured[name]
        assert (seconds, processor) == (f"{row[2].partition(' s')[0]} s", f"{row[4].split()[0]} s")
        assert memory == _size(row[9])
        assert scratch == ("none" if row[12] == "0 MiB" else _size(row[12]))


def _size(cell: str) -> str:
    mib = int(cell.split()[0])
    return f"{mib} MiB" if mib < 1000 else f"{mib / 1024:.1f} GiB"


def _parts(block: Block) -> list[tuple[str, dict[str, object]]]:
    """Return the classes of this package that a configuration names, each with its arguments."""
    found = []

    def note(part: dict[str, object]) -> dict[str, object]:
        if str(part.get("path")).startswith("nvflare_lazy."):
            found.append((part["path"], part.get("args", {})))
        return part

    for text in block.text.strip().split("\n\n"):
        json.loads(text if text.startswith("{") else f"{{{text}}}", object_hook=note)
    return found


def _nodes(kind: type[_Node]) -> Iterator[_Node]:
    for path in (ROOT / "nvflare_lazy").rglob("*.py"):
        yield from (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kind))


def _leaves(kind: type) -> list[type]:
    below = kind.__subclasses__()
    return [leaf for sub in below for leaf in _leaves(sub)] if below else [kind]


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
