# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the subcommands: options, output paths, progress bars, and text for a terminal.

Text from a file is never printed as it is: the name of a tensor may contain escape sequences.
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.cells import cell_len

from nvflare_lazy._text import format_size, parse_size, printable, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence

    import torch

    from nvflare_lazy.formats.hugging_face import ModelDirectory
    from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict

section_option = click.option(
    "--section",
    metavar="NAME",
    help="Part of a training checkpoint to use, for example 'model' of {'model': ..., 'optimizer': ...}.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")

# The names of torch, since the help must not load torch.
_DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
}


def _torch_dtype(context: click.Context, parameter: click.Parameter, value: str | None) -> torch.dtype | None:
    """Click callback: convert the name of a type."""
    if value is None or context.resilient_parsing:
        # The completion of a shell must not load torch.
        return None
    import torch

    dtype: torch.dtype = getattr(torch, _DTYPES[value])
    return dtype


dtype_option = click.option(
    "--dtype",
    type=click.Choice(list(_DTYPES), case_sensitive=False),
    callback=_torch_dtype,
    help="Cast floating-point tensors to this type; other tensors are unchanged.",
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


max_shard_size_option = click.option(
    "--max-shard-size", metavar="SIZE", callback=size, help="Split larger checkpoints, for example 5GiB."
)


class HuggingFaceDirectory(click.Path):
    """A local directory; the message for a URL tells that it is not supported."""

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from nvflare_lazy.remote.url import display, is_url

        if is_url(value):
            self.fail(f"{display(value)} is a URL; download the directory, and give its local path.", param, ctx)
        return super().convert(value, param, ctx)


def _like_directory(context: click.Context, parameter: click.Parameter, value: str | None) -> ModelDirectory | None:
    """Click callback: open a Hugging Face directory."""
    if value is None or context.resilient_parsing:
        return None
    from nvflare_lazy.errors import ModelDirectoryError
    from nvflare_lazy.formats.hugging_face import ModelDirectory

    try:
        return ModelDirectory(value)
    except ModelDirectoryError as error:
        raise click.BadParameter(str(error)) from None


like_option = click.option(
    "--like",
    metavar="HF_DIR",
    type=HuggingFaceDirectory(),
    callback=_like_directory,
    help="Hugging Face directory whose configuration, tokenizer and other files are copied next to the output.",
)


def resolve_output(path: str, option: str, *, force: bool, like: ModelDirectory | None = None) -> str:
    """Return the path or URL of the checkpoint to write: a file, or a local directory that does not exist yet.

    Fails if it exists, or if a file of `like` does, unless `force` permits to replace it. `option` is the argument's
    name for messages.
    """
    from nvflare_lazy.formats.safetensors.shards import OTHER_SUFFIXES, SUFFIX
    from nvflare_lazy.formats.safetensors.writer import checkpoint_path
    from nvflare_lazy.remote.url import basename, child, display, is_url, parent

    if is_url(path):
        path = checkpoint_path(path, like)
        if not force:
            from nvflare_lazy.remote.upload import RemoteDirectory

            directory = parent(path)
            taken = _taken(basename(path), RemoteDirectory(directory).names(), like)
            if taken:
                raise click.ClickException(
                    f"{printable(display(child(directory, taken[0])))} exists; set --force to replace it"
                )
        return path
    if not path.endswith(SUFFIX) and not os.path.isdir(path):
        if path.endswith((*OTHER_SUFFIXES, ".json")) or os.path.exists(path):
            raise click.UsageError(f"{option} must be a directory or end in .safetensors, got {path!r}.")
        return os.path.join(path, "")
    path = checkpoint_path(path, like)
    directory = os.path.dirname(path)
    if force:
        return path
    is_own = like is not None and os.path.samefile(like.path, directory or ".")
    taken = _taken(os.path.basename(path), os.listdir(directory or "."), None if is_own else like)
    if taken:
        raise click.ClickException(f"{printable(os.path.join(directory, taken[0]))} exists; set --force to replace it")
    return path


def _taken(name: str, names: Iterable[str], like: ModelDirectory | None) -> list[str]:
    """Return which of the files of a directory a checkpoint of this name would replace."""
    from nvflare_lazy.formats.safetensors.shards import index_path, parse_shard_name, shard_stem

    names = set(names)
    shards = {other for other in names if (shard := parse_shard_name(other)) and shard.stem == shard_stem(name)}
    written = {name, index_path(name), *shards, *(() if like is None else map(str, like.companions()))}
    return sorted(names & written)


def save_and_print(
    tensors: LazyTensorDict,
    target: str,
    what: str,
    *,
    dtype: torch.dtype | None,
    max_shard_size: int | None,
    like: ModelDirectory | None,
    as_json: bool,
) -> None:
    """Save tensors to `target` with a progress bar, and print the path and their number and size."""
    import nvflare_lazy
    from nvflare_lazy.formats.save_checkpoint import tensor_meta

    nbytes = sum(tensor_meta(name, entry, dtype=dtype).nbytes for name, entry in tensors.entries.items())
    with progress(what, nbytes) as done:
        saved = nvflare_lazy.save(tensors, target, max_shard_size=max_shard_size, dtype=dtype, like=like, progress=done)
    path = display_path(saved, target)
    if as_json:
        print_json({"path": path, "tensors": len(tensors), "nbytes": nbytes, "skipped": [*tensors.extras]})
        return
    click.echo(f"{printable(path)}: {count(len(tensors), 'tensor')}, {format_size(nbytes)}")
    if tensors.extras:
        click.echo(f"Skipped, not tensors: {', '.join(map(printable, tensors.extras))}", err=True)


def display_path(saved: Path | str, target: str) -> str:
    """Return the path of a saved checkpoint, relative if the user's `target` was relative, or its URL."""
    from nvflare_lazy.remote.url import display

    if isinstance(saved, str):
        return display(saved)
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


def print_json(document: object) -> None:
    """Print the findings of a command as one JSON document; numbers that JSON does not have become text."""
    json.dump(to_json(document), sys.stdout, allow_nan=False)
    sys.stdout.write("\n")


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

    Columns are as wide as needed and separated by two spaces, so the output can be searched, cut and copied. A table of
    rich would wrap or cut the names of tensors at the width of the terminal, or at 80 columns in a pipe.
    """
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = []
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            padding = " " * (width - cell_len(cell))
            cells.append(padding + cell if index in right else cell + padding)
        yield "  ".join(cells).rstrip()
