# SPDX-License-Identifier: Apache-2.0
"""Check the English of documents, docstrings, comments, messages and help texts.

    python -m tests.english             # every file, against its limit; `make check` runs this
    python -m tests.english PATH...     # list every finding in these files
    python -m tests.english --lower     # write the numbers of today to limits.txt where they are lower

A file may have no errors, and up to 2 findings (errors and warnings) per 1,000 words, rounded up. `limits.txt` lists
the files with more, and their numbers, which may only fall. `lint: english-ok` in a paragraph exempts it.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.english.prose import Sentence, sentences, words
from tests.english.rules import RULES, Rule

ROOT = Path(__file__).parents[2]
LIMITS = Path(__file__).with_name("limits.txt")
MAX_PER_1000_WORDS = 2


class Finding(NamedTuple):
    """A pattern in a sentence."""

    rule: Rule
    sentence: Sentence

    def __str__(self) -> str:
        severity = "error" if self.rule.is_error else "warning"
        return f"{self.sentence.line}: {severity} {self.rule.name}: {self.sentence.text} [{self.rule.advice}]"


class Limit(NamedTuple):
    """Numbers of errors, and of errors and warnings, in a file."""

    errors: int
    findings: int


class Report(NamedTuple):
    """The findings in a file, and its number of words."""

    findings: list[Finding]
    words: int

    @property
    def numbers(self) -> Limit:
        """The limit that the file needs."""
        return Limit(sum(finding.rule.is_error for finding in self.findings), len(self.findings))

    @property
    def default(self) -> Limit:
        """The limit of a file without an entry in the list."""
        return Limit(0, math.ceil(self.words * MAX_PER_1000_WORDS / 1000))


def examine(path: Path) -> Report:
    """Return the findings in a Markdown or Python file."""
    findings, count = [], 0
    for sentence in sentences(path):
        count += words(sentence.text)
        findings += [Finding(rule, sentence) for rule in RULES for _ in rule.pattern.findall(sentence.text)]
    return Report(findings, count)


def exceeds(numbers: Limit, limit: Limit) -> bool:
    """Whether one of the numbers is above its limit."""
    return numbers.errors > limit.errors or numbers.findings > limit.findings


def lowered(limits: dict[str, Limit], reports: dict[str, Report]) -> dict[str, Limit]:
    """Return the limits that existing files still need, none of which is higher than before."""
    return {
        name: Limit(*map(min, limit, reports[name].numbers))
        for name, limit in limits.items()
        if name in reports and exceeds(reports[name].numbers, reports[name].default)
    }


def read_limits() -> dict[str, Limit]:
    """Return the limits of the files that have one."""
    lines = [line.split() for line in LIMITS.read_text().splitlines() if not line.startswith("#")]
    return {name: Limit(int(errors), int(findings)) for errors, findings, name in lines}


def write_limits(limits: dict[str, Limit]) -> None:
    """Replace the limits."""
    lines = [f"{errors:3} {findings:3} {name}\n" for name, (errors, findings) in sorted(limits.items())]
    LIMITS.write_text("# errors, errors and warnings, file; see __main__.py\n" + "".join(lines))


def check(limits: dict[str, Limit], reports: dict[str, Report]) -> int:
    """Print the findings in files above their limits; return the exit code."""
    failed = 0
    for name, report in reports.items():
        limit = limits.get(name, report.default)
        if exceeds(report.numbers, limit):
            failed += 1
            print(*(f"{name}:{finding}" for finding in report.findings), sep="\n")
            print(f"{name}: {_text(report.numbers)}; limit: {_text(limit)}\n")
    total, count = sum(len(report.findings) for report in reports.values()), sum(r.words for r in reports.values())
    print(f"English: {total} findings in {count} words, {1000 * total / max(1, count):.1f} per 1,000 words")
    if higher := {name for name, limit in limits.items() if lowered(limits, reports).get(name) != limit}:
        print(f"Limits higher than necessary: {len(higher)}; lower them with: python -m tests.english --lower")
    return int(failed > 0)


def _text(numbers: Limit) -> str:
    return f"errors {numbers.errors}, errors and warnings {numbers.findings}"


def files() -> list[Path]:
    """Return the Markdown and Python files of the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for name in sorted(set(listed)) if (path := ROOT / name).is_file()]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.english", description="Check the English of the project.")
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="list every finding in these files")
    parser.add_argument("--lower", action="store_true", help="lower the limits to the numbers of today")
    options = parser.parse_args()
    for path in options.paths:
        below = [path] if path.is_file() else sorted([*path.rglob("*.md"), *path.rglob("*.py")])
        for each in below:
            print(*(f"{each}:{finding}\n" for finding in examine(each).findings), sep="", end="")
    if options.paths:
        return 0
    reports = {path.relative_to(ROOT).as_posix(): examine(path) for path in files()}
    limits = read_limits()
    if options.lower:
        limits = lowered(limits, reports)
        write_limits(limits)
    return check(limits, reports)


if __name__ == "__main__":
    sys.exit(main())
