# SPDX-License-Identifier: Apache-2.0
"""The sentences of a file: paragraphs and table cells of Markdown; docstrings, comments and messages of Python."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: A paragraph with this text is not checked.
OPT_OUT = "lint: english-ok"
#: The first arguments of these functions, and of exceptions, are messages.
_MESSAGE_FUNCTIONS = {
    *("info", "warning", "error", "debug", "exception", "log_info", "log_warning", "log_error", "log_exception"),
    *("echo", "secho", "UsageError", "BadParameter", "ClickException", "Finding"),
    *("fault", "_malformed", "_broken", "_damaged", "_say", "_impossible"),
}
_HELP = ("help", "short_help", "epilog")
_NOT_PROSE = ("SPDX", "type:", "noqa", "pragma", "!")
#: Indented code and drawings in docstrings, and the list items after a word and a colon that are prose.
_CODE = re.compile(r" {4,}\S|\s*[├└│]")
_ARGUMENT = re.compile(r"\s+\w+: ")
_LIST_ITEM = re.compile(r"(?:#{1,6} |[-*+] |\d+\. )")


class Sentence(NamedTuple):
    """A sentence without code, and the line where its paragraph or docstring starts."""

    line: int
    text: str


def sentences(path: Path) -> Iterator[Sentence]:
    """Yield the sentences of a Markdown or Python file."""
    text = path.read_text(encoding="utf-8")
    for line, paragraph in _python(text) if path.suffix == ".py" else _markdown(text):
        if OPT_OUT not in paragraph:
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`\"'(\[])", _without_code(paragraph)):
                if re.search(r"[A-Za-z]{2}", sentence):
                    yield Sentence(line, sentence)


def words(sentence: str) -> int:
    """Return the number of words of a sentence."""
    return len(re.findall(r"[A-Za-z'’-]+", sentence))


def _without_code(text: str) -> str:
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"CODE(?:,? (?:and |or )?CODE)+", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+", "URL", text)
    text = re.sub(r"\*\*?|__", "", text)
    return " ".join(text.split())


def _markdown(text: str) -> Iterator[tuple[int, str]]:
    paragraph: list[str] = []
    start, in_code = 0, False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        stripped = line.strip()
        if re.match(r"```|~~~", stripped):
            in_code = not in_code
            stripped = ""
        elif in_code or re.fullmatch(r"<!--.*-->", stripped) or (re.match(r" {4}\S", line) and not paragraph):
            continue
        begins = _LIST_ITEM.match(stripped)
        if paragraph and (not stripped or begins or stripped.startswith("|")):
            yield start, " ".join(paragraph)
            paragraph = []
        if stripped.startswith("|"):
            if set(stripped) - set("|-: "):
                for cell in re.split(r"(?<!\\)\|", stripped.strip("|")):
                    yield number, cell.strip()
        elif stripped.startswith("#"):
            yield number, stripped.lstrip("# ")
        elif stripped:
            start = start if paragraph else number
            paragraph.append(_LIST_ITEM.sub("", stripped, count=1) if begins else stripped)


def _python(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if docstring := ast.get_docstring(node):
                for paragraph in _paragraphs(docstring):
                    yield node.body[0].lineno, paragraph
        elif isinstance(node, ast.Call):
            for message in _messages(node):
                yield node.lineno, message
    yield from _comments(text)


def _paragraphs(docstring: str) -> list[str]:
    docstring = re.split(r"(?m)^\s*(?:>>>|::)", docstring)[0]
    prose = [line for line in docstring.splitlines() if not _CODE.match(line) or _ARGUMENT.match(line)]
    return re.split(r"\n\s*\n", "\n".join(prose))


def _messages(call: ast.Call) -> Iterator[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in _MESSAGE_FUNCTIONS or name.endswith("Error"):
        yield from (text for argument in call.args if " " in (text := _literal(argument)))
    yield from (_literal(keyword.value) for keyword in call.keywords if keyword.arg in _HELP)


def _literal(node: ast.expr) -> str:
    """Return the text of a string expression, with CODE for its variable parts."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "CODE" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and (_literal(node.left) or _literal(node.right)):
        return (_literal(node.left) or "CODE") + (_literal(node.right) or "CODE")
    return ""


def _comments(text: str) -> Iterator[tuple[int, str]]:
    block: list[str] = []
    start = last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        comment = token.string.lstrip("#: ").strip()
        if token.type != tokenize.COMMENT or comment.startswith(_NOT_PROSE):
            continue
        line = token.start[0]
        if block and line != last + 1:
            yield start, " ".join(block)
            block = []
        start = start if block else line
        last = line
        block.append(comment)
    if block:
        yield start, " ".join(block)
