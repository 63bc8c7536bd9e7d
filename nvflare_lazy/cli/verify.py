# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy verify`: whether checkpoints can be read to their last byte.

What a person runs after a copy or a download, and before a round depends on the file.
"""

from __future__ import annotations

import click

from nvflare_lazy._text import format_size
from nvflare_lazy.cli.options import section_option
from nvflare_lazy.cli.wording import count, printable


@click.command()
@click.argument("files", metavar="FILE...", type=click.Path(), nargs=-1, required=True)
@section_option
@click.option("--finite", is_flag=True, help="Also fail on NaN and infinite values.")
@click.pass_context
def verify(context: click.Context, files: tuple[str, ...], section: str | None, finite: bool) -> None:
    """Check checkpoints and read all of their data.

    FILE is of any kind: a safetensors file, the index or the directory of a sharded one, or a PyTorch checkpoint.
    Everything its format says must be so, every byte must be there to read, and the checksums, where the format has
    them, must be right. Nothing in a file is run.

    The exit code is 0 if all files are good, and 1 if any is not.
    """
    from nvflare_lazy.cli.checking import check

    bad = 0
    for file in files:
        report = check(file, section=section, finite=finite)
        if report.problems:
            bad += 1
            click.echo(f"{printable(file)}: BAD")
        else:
            click.echo(f"{printable(file)}: ok, {count(report.tensors, 'tensor')}, {format_size(report.nbytes)}")
        for problem in report.problems:
            click.echo(f"  {problem}")
    context.exit(1 if bad else 0)
