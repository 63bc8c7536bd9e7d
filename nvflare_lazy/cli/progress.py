# SPDX-License-Identifier: Apache-2.0
"""A progress bar for whoever watches a terminal, and nothing for whoever does not.

Commands that read or write whole checkpoints say here how far they are.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
