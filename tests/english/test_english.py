# SPDX-License-Identifier: Apache-2.0
"""The check of the project's English: which text it reads, which patterns it finds, and how limits fall."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.english import __main__ as english
from tests.english.__main__ import Limit, Report
from tests.english.prose import sentences

PYTHON = '''"""Return the result. Nobody sends `whoever`.

    nobody reads this drawing

Args:
    size: Whoever sets it.

>>> print("nobody")
"""
# Nobody waits
# for it.
print("nobody")  # noqa: S101 nobody
raise ValueError(f"nobody has {1}" + " a name")
log.warning("nobody came: %s", "whoever")
option("--size", help="Nobody needs it.")
'''
MARKDOWN = """# Nobody reads

A paragraph of [whoever](nobody.md)
and `nobody`. A second sentence.
<!-- nobody -->
- nobody
| nobody | `nobody` |
|---|---|

```console
$ nobody
```
Whoever opts out <!-- lint: english-ok -->
"""


def test_sentences_of_python(tmp_path):
    """Docstrings without code, comments, messages and help texts are checked; other strings are not."""
    (tmp_path / "a.py").write_text(PYTHON)
    assert [(sentence.line, sentence.text) for sentence in sentences(tmp_path / "a.py")] == [
        (1, "Return the result."),
        (1, "Nobody sends CODE."),
        (1, "Args: size: Whoever sets it."),
        (13, "nobody has CODE a name"),
        (14, "nobody came: %s"),
        (15, "Nobody needs it."),
        (10, "Nobody waits for it."),
    ]


def test_sentences_of_markdown(tmp_path):
    """Headings, paragraphs, list items and table cells are checked; code, comments and marked paragraphs are not."""
    (tmp_path / "a.md").write_text(MARKDOWN)
    assert [(sentence.line, sentence.text) for sentence in sentences(tmp_path / "a.md")] == [
        (1, "Nobody reads"),
        (3, "A paragraph of whoever and CODE."),
        (3, "A second sentence."),
        (6, "nobody"),
        (7, "nobody"),
        (7, "CODE"),
    ]


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        ("The receiver writes what comes to disk.", "The receiver writes the payload to disk.", "what-noun"),
        ("Who has weight zero is skipped. Whoever sets it", "Contributors with weight 0 are skipped.", "whoever"),
        ("skipped: nobody", "skipped: none", "nobody"),
        ("exclude is no regular expression", "exclude is not a valid regular expression", "is-no"),
        ("a directory of its own", "a separate directory", "of-ours"),
        ("at most 32 MiB under way", "at most 32 MiB in flight", "under-way"),
        ("from 3 MiB on", "3 MiB or more", "from-on"),
        ("It is used without NVFlare, too.", "It can also be used without NVFlare.", "too-tail"),
        ("a shard is not there", "a shard is missing", "as-if-exists"),
    ],
)
def test_rules(tmp_path, before, after, rule):
    """The wording before a correction breaks the rule; the correction breaks none."""
    (tmp_path / "a.md").write_text(before)
    assert rule in {finding.rule.name for finding in english.examine(tmp_path / "a.md").findings}
    (tmp_path / "a.md").write_text(after)
    assert not english.examine(tmp_path / "a.md").findings


@pytest.fixture
def report(tmp_path) -> Report:
    """A file with an error and a warning."""
    path = Path(tmp_path / "a.md")
    path.write_text("Nobody knows of it.")
    return english.examine(path)


def test_default_limit(report, tmp_path, capsys):
    """A file without an entry may have no errors, and 2 warnings per 1,000 words."""
    assert english.check({}, {"a.md": report}) == 1
    assert "a.md:1: error nobody: Nobody knows of it. [no client" in capsys.readouterr().out
    for count, code in ((1, 0), (2, 0), (3, 1)):
        path = tmp_path / "b.md"
        path.write_text("It knows of it. " * count + "word " * 900)
        assert english.check({}, {"b.md": english.examine(path)}) == code


def test_limits_only_fall(report, capsys):
    """The check names limits above the numbers, and lowering removes those of correct and of missing files."""
    assert report.numbers == Limit(1, 2)
    clean = Report([], 100)
    assert english.check({"a.md": Limit(1, 2)}, {"a.md": report}) == 0
    assert "higher" not in capsys.readouterr().out
    for low in (Limit(0, 2), Limit(1, 1)):
        assert english.check({"a.md": low}, {"a.md": report}) == 1
    capsys.readouterr()
    limits = {"a.md": Limit(3, 1), "b.md": Limit(1, 1), "c.md": Limit(1, 1)}
    assert english.check({"a.md": Limit(3, 4), "b.md": Limit(1, 1)}, {"a.md": report, "b.md": clean}) == 0
    assert "Limits higher than necessary: 2; lower them" in capsys.readouterr().out
    assert english.lowered(limits, {"a.md": report, "b.md": clean}) == {"a.md": Limit(1, 1)}


def test_list_of_limits(tmp_path, monkeypatch):
    """Written limits are read again."""
    monkeypatch.setattr(english, "LIMITS", tmp_path / "limits.txt")
    limits = {"b.md": Limit(3, 12), "a.md": Limit(0, 1)}
    english.write_limits(limits)
    assert english.read_limits() == limits
