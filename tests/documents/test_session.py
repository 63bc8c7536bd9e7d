# SPDX-License-Identifier: Apache-2.0
"""The runner of documents notices when a document is wrong; a runner that does not is worse than none."""

from __future__ import annotations

import textwrap

import pytest

from tests.documents.markdown import blocks
from tests.documents.session import DocumentError, matches, run_document

FENCE = "```"


@pytest.fixture
def run(tmp_path):
    """Run a document given as text, where ''' replaces a fence; its files are in the directory."""

    def run(text):
        document = tmp_path / "document.md"
        document.write_text(textwrap.dedent(text).replace("'''", FENCE))
        directory = tmp_path / "directory"
        directory.mkdir()
        run_document(document, directory)
        return directory

    return run


RIGHT = {
    "console": """
        '''console
        $ echo one; echo two >&2
        one
        two
        $ cd /; pwd
        /
        $ printf 'no line feed'
        no line feed
        $ pwd   # `cd` holds until the block ends
        /
        '''
    """,
    "continued command": """
        '''console
        $ echo one \\
        >     two
        one two
        '''
    """,
    "expected failure": """
        '''console
        $ ls nowhere
        ls: ...nowhere...
        $ echo $?
        2
        '''
    """,
    "ellipsis": """
        '''console
        $ seq 100; echo took 12.7 s
        1
        ...
        99
        100
        took ... s
        '''
    """,
    "bash": """
        '''bash
        echo anything
        test -d .
        '''
    """,
    "python": """
        '''python
        x = [1, 2]
        '''
        Text, and later
        '''python
        assert x == [1, 2]
        print("anything")
        '''
        '''python
        >>> x
        [1, 2]
        >>> object()
        <object object at 0x...>
        '''
    """,
    "one directory": """
        '''python
        open("made.txt", "w").write("by python")
        '''
        '''console
        $ cat made.txt
        by python
        '''
    """,
    "file": """
        <!-- file: sub/job.py -->
        '''python
        print("from the job")
        '''
        '''console
        $ python sub/job.py
        from the job
        '''
    """,
    "not run": """
        <!-- not run: needs ten machines -->

        '''bash
        exit 1
        '''
        <!-- not run: shows a format -->
        '''text
        anything
        '''
    """,
    "indented, with other fences": """
        1. First

            ~~~bash
            test 1 = 1
            ~~~
        2. Second
           <!-- not run: a document in a document -->
           ''''''
           '''python
           raise ValueError
           '''
           ''''''
    """,
}

WRONG = {
    "output": ("$ echo one\ntwo", "console", "should print\ntwo\nbut printed\none"),
    "missing output": ("$ true\none", "console", "should print\none"),
    "surplus output": ("$ echo one", "console", "but printed\none"),
    "surplus line": ("$ seq 3\n1\n2", "console", "should print"),
    "exit code": ("$ false", "console", "exit code 1"),
    "unknown command": ("$ nvflare-lzay inspect", "console", "exit code 127"),
    "second command": ("$ true\n$ echo one\n\n$ echo two\nthree", "console", "but printed"),
    "early exit": ("$ exit 0\n$ true", "console", "never ended"),
    "no command": ("output\n$ true", "console", "must start with a command"),
    "script": ("false\ntrue", "bash", "exit code 1"),
    "pipe in a script": ("false | true", "bash", "exit code 1"),
    "unset variable in a script": ("echo $nothing", "bash", "unbound variable"),
    "raises": ("x = 1\nx.nothing", "python", "line 3, in <module>"),
    "syntax": ("x = = 1", "python", "SyntaxError"),
    "exits": ("import sys; sys.exit(0)", "python", "SystemExit"),
    "dies": ("import os; os._exit(0)", "python", "ended the interpreter"),
    "doctest": (">>> 1 + 1\n3", "python", "Got:"),
    "doctest raises": (">>> 1 / 0", "pycon", "ZeroDivisionError"),
    "other language": ("key: value", "yaml", "cannot run a block of yaml"),
    "no language": ("text", "", "cannot run a block of no language"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(run, name):
    """Correct blocks of each kind pass."""
    run(RIGHT[name])


@pytest.mark.parametrize("name", WRONG)
def test_wrong(run, name):
    """Errors in blocks of each kind fail, and the message has the line and the cause."""
    text, language, message = WRONG[name]
    with pytest.raises(DocumentError) as caught:
        run(f"{FENCE}{language}\n{text}\n{FENCE}\n")
    assert message in str(caught.value)
    assert "document.md:2" in str(caught.value)


def test_comment_belongs_to_one_block(run):
    """A reason does not reach past the block below it, nor past a line of text."""
    reason = "<!-- not run: why not -->\n"
    failing = f"{FENCE}bash\nfalse\n{FENCE}\n"
    run(reason + failing)


@pytest.mark.parametrize("between", [f"{FENCE}bash\ntrue\n{FENCE}\n", "Some text.\n"])
def test_comment_reaches_no_further(run, between):
    """Another block, or text, between a reason and a block: the reason is not that block's."""
    with pytest.raises(DocumentError):
        run(f"<!-- not run: why not -->\n{between}{FENCE}bash\nfalse\n{FENCE}\n")


def test_reason_is_needed(run):
    """`not run` without a reason does not count."""
    with pytest.raises(DocumentError):
        run(f"<!-- not run: -->\n{FENCE}bash\nfalse\n{FENCE}\n")


def test_open_block(tmp_path):
    """A block without an end would hide the rest of the document."""
    path = tmp_path / "document.md"
    path.write_text(f"{FENCE}bash\ntrue\n")
    with pytest.raises(ValueError, match=r"document\.md:1: .* has no end"):
        blocks(path)


@pytest.mark.parametrize(
    ("expected", "output", "match"),
    [
        ("", "", True),
        ("", "x", False),
        ("a", "a  \n\n", True),
        ("...", "", True),
        ("...", "a\nb", True),
        ("a\n...\nb", "a\nb", True),
        ("a\n...\nb", "a\nx\ny\nb", True),
        ("a\n...\nb", "a\nx", False),
        ("a ... c", "a b c", True),
        ("a ... c", "a b\nc", False),
        ("a.c", "abc", False),
        ("a\n\nb", "a\n\nb", True),
        ("a\n\nb", "a\nb", False),
    ],
)
def test_matching(expected, output, match):
    """`...` matches any text in a line, and any lines where it is a line; nothing else is special."""
    assert matches(expected, output) is match
