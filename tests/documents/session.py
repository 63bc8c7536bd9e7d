# SPDX-License-Identifier: Apache-2.0
"""A document carried out from top to bottom, as a reader would who types along.

All blocks of a document share a directory, which is empty at first, and all its Python blocks one interpreter:

- `console`: lines after `$ ` are commands (a `\\` at the end continues one), what follows is the output they must
  have, stdout and stderr together. `...` matches any text, and on a separate line any lines. A command must succeed,
  unless `$ echo $?` is the next one.
- `bash`: a script without expected output, which must succeed.
- `python`: must not raise. With `>>>` prompts it is a doctest, where `...` matches any text.
- any language below `<!-- file: NAME -->`: is written to that file, for later blocks to use.
- any language below `<!-- not run: REASON -->`: is left alone. There is no other way not to be run.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

from tests.documents.markdown import Block, blocks

_TIMEOUT_SECONDS = 600

# Runs the Python blocks of a document; reads one per line, and reports the result of each.
_INTERPRETER = """
import doctest, json, sys, traceback

def run(code, path, line):
    if code.lstrip().startswith(">>>"):
        test = doctest.DocTestParser().get_doctest(code, namespace, path, path, line - 1)
        test.globs = namespace  # not a copy: later blocks use what this one defines
        return doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, clear_globs=False).failed
    try:
        exec(compile("\\n" * (line - 1) + code, path, "exec"), namespace)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

sys.stderr = sys.stdout
namespace = {"__name__": "__main__"}
for request in sys.stdin:
    failed = run(*json.loads(request))
    print("\\n" + sys.argv[1], failed, flush=True)
"""


class DocumentError(AssertionError):
    """A statement of a document is wrong."""


def run_document(path: Path, directory: Path) -> None:
    """Carry out a document's code blocks in `directory`; raise `DocumentError` at the first that goes wrong."""
    with _Python(directory) as python:
        for block in blocks(path):
            if block.not_run:
                continue
            if block.file:
                target = directory / block.file
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(block.text, encoding="utf-8")
            elif block.language in ("python", "pycon"):
                python.run(block)
            elif block.language == "console":
                _run_console(block, directory)
            elif block.language in ("bash", "sh"):
                _run_script(block, directory)
            else:
                raise DocumentError(
                    f"{block.where}: cannot run a block of {block.language or 'no language'}: put "
                    "`<!-- not run: REASON -->` or `<!-- file: NAME -->` above it"
                )


class _Python:
    """The interpreter of a document's Python blocks, started with the first of them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None
        self._marker = secrets.token_hex(8)

    def __enter__(self) -> _Python:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def run(self, block: Block) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _INTERPRETER, self._marker],
                cwd=self._directory,
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        self._process.stdin.write(json.dumps([block.text, str(block.path), block.line]) + "\n")
        self._process.stdin.flush()
        output = ""
        for line in self._process.stdout:
            if line.startswith(self._marker):
                if line.split()[1] != "0":
                    raise DocumentError(f"{block.where}: this Python block failed:\n{output}")
                return
            output += line
        raise DocumentError(f"{block.where}: this Python block ended the interpreter:\n{output}")


def _run_script(block: Block, directory: Path) -> None:
    done = _bash(f"set -euo pipefail\n{block.text}", directory)
    if done.returncode:
        raise DocumentError(f"{block.where}: this script ended with exit code {done.returncode}:\n{done.stdout}")


def _run_console(block: Block, directory: Path) -> None:
    marker = secrets.token_hex(8)
    session = _commands(block)
    script = "".join(
        f"{command}\n__code=$?; printf '\\n{marker} %d\\n' $__code; (exit $__code)\n" for command, _ in session
    )
    parts = re.split(rf"\n{marker} (\d+)\n", _bash(script, directory).stdout)
    results = list(zip(parts[::2], parts[1::2], strict=False))
    for index, (command, expected) in enumerate(session):
        if index == len(results):
            raise DocumentError(f"{block.where}: `{command}` never ended:\n{parts[-1]}")
        output, code = results[index]
        next_command = session[index + 1][0] if index + 1 < len(session) else ""
        if code != "0" and next_command.strip() != "echo $?":
            raise DocumentError(f"{block.where}: `{command}` ended with exit code {code}:\n{output}")
        if not matches(expected, output):
            raise DocumentError(f"{block.where}: `{command}` should print\n{expected}\nbut printed\n{output}")


def _commands(block: Block) -> list[tuple[str, str]]:
    """Return the commands of a console block, each with the output it should have."""
    session: list[tuple[list[str], list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            session.append(([line[2:]], []))
        elif not session:
            raise DocumentError(f"{block.where}: a console block must start with a command, `$ ...`")
        elif session[-1][0][-1].endswith("\\") and not session[-1][1]:
            session[-1][0].append(line.removeprefix("> "))
        else:
            session[-1][1].append(line)
    return [("\n".join(command), "\n".join(output)) for command, output in session]


def matches(expected: str, output: str) -> bool:
    """Whether output is as expected; white space at the ends of lines and of the whole does not count."""
    pattern = ""
    for line in expected.strip().splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*?".join(re.escape(part) for part in line.rstrip().split("...")) + r"[ \t]*\n"
    text = "".join(line.rstrip() + "\n" for line in output.strip().splitlines())
    return re.fullmatch(pattern, text) is not None


def _bash(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script],
        cwd=directory,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_SECONDS,
    )


def _environment() -> dict[str, str]:
    # The documents refer to the programs that are installed next to this interpreter.
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "FORCE_COLOR")}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "LC_ALL": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
    }
