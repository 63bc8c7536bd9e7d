# SPDX-License-Identifier: Apache-2.0
"""What the subcommands have in common: options, output paths, progress bars, and text for a terminal.

A file's own words are never trusted with the terminal: the name of a tensor may hold escape sequences.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.cells import cell_len

from nvflare_lazy._text import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

section_option = click.option(
    "--section",
    metavar="NAME",
    help="The part of a training checkpoint to take, for example 'model' of {'model': ..., 'optimizer': ...}.",
)


def regex(context: click.Context, parameter: click.Parameter, value: str | None) -> re.Pattern[str] | None:
    """Click callback: return a regular expression compiled."""
    try:
        return None if value is None else re.compile(value)
    except (re.error, OverflowError) as error:
        raise click.BadParameter(f"{value!r} is no regular expression: {error}") from None
    except RecursionError:
        raise click.BadParameter("The regular expression is nested too deep.") from None


def size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Click callback: return a size such as "5GiB" in bytes."""
    try:
        return None if value is None else parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def free_target(path: str, what: str, *, force: bool) -> str:
    """Return the file that a checkpoint is to be called as a whole, or refuse.

    Args:
        path: A file that is called so, or a directory.
        what: What the argument is called.
        force: Whether a checkpoint that is there may be replaced.
    """
    from nvflare_lazy.formats.shard_names import index_of, parse_shard_name, stem_of

    if os.path.isdir(path):
        path = os.path.join(path, "model.safetensors")
    elif not path.endswith(".safetensors"):
        raise click.UsageError(f"{what} is a directory or ends in .safetensors, which {path!r} does not.")
    if force:
        return path
    directory = os.path.dirname(path)
    names = os.listdir(directory or ".")
    shards = {name for name in names if (shard := parse_shard_name(name)) and shard.stem == stem_of(path)}
    taken = sorted(shards.union(names) & {os.path.basename(path), os.path.basename(index_of(path)), *shards})
    if taken:
        raise click.ClickException(f"{printable(os.path.join(directory, taken[0]))} exists; --force replaces it")
    return path


def shown(saved: Path, target: str) -> str:
    """Return the path of a saved checkpoint as it is best told to whoever asked for `target`."""
    beside = os.path.join(os.path.dirname(target), saved.name)
    # Through a symbolic link it went elsewhere.
    return beside if os.path.realpath(beside) == os.path.realpath(saved) else str(saved)


@contextmanager
def progress(what: str, total_nbytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr for the length of a block; gone afterwards, and never there if stderr is no terminal.

    Args:
        what: What is going on, for example "Reading".
        total_nbytes: How many bytes there are to do.

    Yields:
        What is to be told of each number of bytes done; from any thread.
    """
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=total_nbytes)
        yield lambda nbytes: bar.advance(task, nbytes)


def printable(text: str) -> str:
    """Return `text` with everything a terminal would obey, or cannot show, written as an escape."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii") for char in text
    )


def error_line(error: Exception) -> str:
    """Return what an error has to say in one line."""
    text = " ".join(str(error).splitlines())
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return printable(text) or type(error).__name__


def count(number: int, thing: str) -> str:
    """Return for example "1 tensor" or "1,234 tensors"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> Iterator[str]:
    """Yield the lines of a table.

    A plain one, with two spaces between its columns and as wide as it has to be: it starts at once, however many rows
    there are, and can be searched, cut and copied.

    Args:
        rows: The cells.
        right: Numbers of the columns that are set against their right edge.
    """
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = []
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            padding = " " * (width - cell_len(cell))
            cells.append(padding + cell if index in right else cell + padding)
        yield "  ".join(cells).rstrip()
