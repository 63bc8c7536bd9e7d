# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the subcommands: options, output paths, progress bars, and text for a terminal.

Text from a file is never printed as it is: the name of a tensor may contain escape sequences.
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
    help="Part of a training checkpoint to use, for example 'model' of {'model': ..., 'optimizer': ...}.",
)


def regex(context: click.Context, parameter: click.Parameter, value: str | None) -> re.Pattern[str] | None:
    """Click callback: compile a regular expression."""
    try:
        return None if value is None else re.compile(value)
    except (re.error, OverflowError) as error:
        raise click.BadParameter(f"Invalid regular expression {value!r}: {error}") from None
    except RecursionError:
        raise click.BadParameter("Invalid regular expression: nested too deeply.") from None


def size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Click callback: convert a size such as "5GiB" to bytes."""
    try:
        return None if value is None else parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def resolve_output(path: str, option: str, *, force: bool) -> str:
    """Return the path of the checkpoint to write: a file, or `model.safetensors` in a directory.

    Fails if it exists, unless `force` permits to replace it. `option` is the argument's name for messages.
    """
    from nvflare_lazy.formats.safetensors.shards import index_path, parse_shard_name, shard_stem

    if os.path.isdir(path):
        path = os.path.join(path, "model.safetensors")
    elif not path.endswith(".safetensors"):
        raise click.UsageError(f"{option} must be a directory or end in .safetensors, got {path!r}.")
    if force:
        return path
    directory = os.path.dirname(path)
    names = os.listdir(directory or ".")
    shards = {name for name in names if (shard := parse_shard_name(name)) and shard.stem == shard_stem(path)}
    taken = sorted(shards.union(names) & {os.path.basename(path), os.path.basename(index_path(path)), *shards})
    if taken:
        raise click.ClickException(f"{printable(os.path.join(directory, taken[0]))} exists; set --force to replace it")
    return path


def display_path(saved: Path, target: str) -> str:
    """Return the path of a saved checkpoint, relative if the user's `target` was relative."""
    same_directory = os.path.join(os.path.dirname(target), saved.name)
    # A symbolic link leads to another directory.
    return same_directory if os.path.realpath(same_directory) == os.path.realpath(saved) else str(saved)


@contextmanager
def progress(what: str, total_nbytes: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr while the block runs; nothing if stderr is not a terminal.

    Yields:
        A function to call with each number of processed bytes, from any thread.
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
    """Return `text` with control characters and unprintable characters escaped."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii") for char in text
    )


def error_line(error: Exception) -> str:
    """Return the message of an error in one line."""
    text = " ".join(str(error).splitlines())
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return printable(text) or type(error).__name__


def count(number: int, singular: str, plural: str | None = None) -> str:
    """Return for example "1 tensor" or "1,234 tensors"."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"


def columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> Iterator[str]:
    """Yield the lines of a table, with the columns at the indexes `right` right-aligned.

    Columns are as wide as needed and separated by two spaces: the output starts at once, however many rows there are,
    and can be searched, cut and copied.
    """
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = []
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            padding = " " * (width - cell_len(cell))
            cells.append(padding + cell if index in right else cell + padding)
        yield "  ".join(cells).rstrip()
