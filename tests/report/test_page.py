# SPDX-License-Identifier: Apache-2.0
"""The page and the command: structure, accessibility, untrusted text, bounds, and the other two outputs."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from nvflare_lazy.cli import report as command
from nvflare_lazy.records import FILE_NAME, RoundRecord
from nvflare_lazy.report import read_job, summarize
from nvflare_lazy.report.charts import PALETTE
from nvflare_lazy.report.page import page
from tests.cli.conftest import cli as cli
from tests.report.jobs import server_records, simulated, write

EVIL = "<script>alert(1)</script>\"'&\x1b[31m\u202e$x^2$" + "A" * 5000
_EMPTY = {"meta", "link", "img", "br", "input"}


class Structure(HTMLParser):
    """The elements of a page; an element that is not closed, or closed twice, is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in _EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if data.strip() and self._open:
            self.text.setdefault(self._open[-1], []).append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> str:
    """The page of a job with a skipped client."""
    workspace = simulated(tmp_path_factory.mktemp("job") / "workspace", skipped={1: {"site-3": "not finite"}})
    return page(summarize(read_job(workspace)))


def test_the_page_is_one_file(made: str):
    """Nothing is loaded and nothing is run, which the page also forbids; it is small, and the same for the same job."""
    structure = Structure(made)
    tags = {tag for tag, _ in structure.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "form", "base"}
    references = [value for _, attributes in structure.elements for name, value in attributes.items() if "href" in name]
    assert references
    assert all(value.startswith("#") for value in references)
    assert "default-src 'none'" in made
    assert not re.search(r"@import|url\((?!#)", made)
    assert len(made.encode()) < 150_000


def test_the_page_is_accessible(made: str):
    """Landmarks, headings in order, named pictures, tables with headers, unique ids."""
    structure = Structure(made)
    ids = Counter(attributes["id"] for _, attributes in structure.elements if "id" in attributes)
    assert max(ids.values()) == 1
    assert structure.all("html")[0]["lang"] == "en"
    for landmark in ("header", "nav", "main", "footer", "h1"):
        assert len(structure.all(landmark)) == 1
    levels = [int(tag[1]) for tag, _ in structure.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    drawings = structure.all("svg")
    assert len(drawings) == 7
    for drawing in drawings:
        assert drawing["role"] == "img"
        assert set(drawing["aria-labelledby"].split()) <= ids.keys()
    # One table with the numbers of each chart, and tables of rounds, clients, skipped results, processes and settings.
    tables = structure.all("table")
    assert len(tables) == len(structure.all("caption")) == len(drawings) + 5
    assert {header.get("scope") for header in structure.all("th")} == {"col", "row"}
    assert {link["href"][1:] for link in structure.all("a")} <= ids.keys()
    used = [value for _, attributes in structure.elements for value in attributes.values() if value]
    assert all(name in ids for value in used for name in re.findall(r"url\(#([^)]+)\)", value))


def test_colors_are_those_of_the_scheme(made: str):
    """Light and dark define the same variables, and all charts use only these."""
    light, dark = re.findall(r":root \{([^}]*--ink[^}]*)\}", made)
    names = set(re.findall(r"--(\w+):", light))
    assert names == set(re.findall(r"--(\w+):", dark)) >= PALETTE.keys()
    assert set(re.findall(r"var\(--(\w+)\)", made)) <= names
    drawings = "".join(re.findall(r"<svg.*?</svg>", made, re.DOTALL))
    assert not re.findall(r"#[0-9a-f]{6}", drawings)


def test_text_of_peers_stays_text(tmp_path: Path):
    """Names and reasons of a malicious client are escaped and cut; extreme numbers are drawn, or not used."""
    clients = [EVIL, "site-\u4e2d", "$\\frac{$", *(f"client-{number}" for number in range(250))]
    rounds = range(60)
    skipped = {number: {EVIL: EVIL, "client-7": "\\n<img src=x onerror=alert(2)>"} for number in rounds}
    records = server_records(job=EVIL, clients=clients, rounds=rounds, skipped=skipped, model=EVIL)
    for place, record in enumerate(records):
        if isinstance(record, RoundRecord):
            record.metrics = {"accuracy": 1e308 if place % 2 else -1e308, EVIL: 0.5}
    path = write(tmp_path / FILE_NAME, [*records, RoundRecord(time=1e300, round=61, seconds=1e300)])
    path.write_bytes(path.read_bytes() + b'{"kind": "sample", "memory_bytes": 1%s}\n' % (b"0" * 400))
    report = summarize(read_job(tmp_path))
    assert report.processes[0].damaged == 1
    made = page(report)
    structure = Structure(made)
    tags = {tag for tag, _ in structure.elements}
    assert not tags & {"script", "img"}
    assert not any(name.startswith("on") for _, attributes in structure.elements for name in attributes)
    assert "\x1b" not in made
    assert "\u202e" not in made
    assert "A" * 400 not in made
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in made
    assert len(made.encode()) < 350_000


def test_the_command(cli, tmp_path: Path, monkeypatch):
    """A page with its answers on the terminal, a picture, the numbers as JSON, and errors that have a remedy."""
    simulated(tmp_path / "workspace", slow="site-3")
    made = cli("report", "workspace", "--out", "job.html", "--png", "job.png")
    assert made.code == 0, made.err
    assert re.search(r"^  Slowest client: +site-3; median 8\.0 s", made.out, re.MULTILINE)
    assert made.out.splitlines()[-2:] == [f"Report: {tmp_path / 'job.html'}", f"Report: {tmp_path / 'job.png'}"]
    assert (tmp_path / "job.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "job.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.html", "job.png", "workspace"]

    monkeypatch.setattr(command, "find_spec", lambda name: None)
    numbers = json.loads(cli("report", "workspace", "--json").out)
    assert numbers["rounds"][2]["received_bytes"] == 300 << 20
    assert numbers["clients"][2]["delay_seconds"] == 18.0
    assert numbers["answers"]["State"] == "finished; 3 rounds in 31.0 s"
    without = cli("report", "workspace")
    assert without.code == 1
    assert without.err == (
        "Error: Charts require matplotlib; install it with: pip install 'nvflare-lazy[report]'. "
        "To print the numbers without it, set --json.\n"
    )
    missing = cli("report", "elsewhere")
    assert (missing.code, missing.err.count("\n")) == (1, 1)
