# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy inspect`: what is in a checkpoint.

Reads headers and pickles, never tensor data, so it takes as long for a hundred gigabytes as for one.
"""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

import click

from nvflare_lazy.cli.options import regex, section_option
from nvflare_lazy.cli.wording import columns, count, printable

if TYPE_CHECKING:
    import re

    from nvflare_lazy.cli.listing import Row, Total

_LONGEST_VALUE = 200


@click.command()
@click.argument("file", type=click.Path())
@section_option
@click.option("--match", metavar="REGEX", callback=regex, help="Only tensors in whose names this is found.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def inspect(file: str, section: str | None, match: re.Pattern[str] | None, as_json: bool) -> None:
    """List the tensors of a checkpoint.

    FILE is of any kind: a safetensors file, the index or the directory of a sharded one, or a PyTorch checkpoint.
    Names, types and shapes are read from it, the tensors themselves are not.
    """
    import nvflare_lazy
    from nvflare_lazy.cli.listing import rows_of, totals

    tensors = nvflare_lazy.open(file, section=section)
    rows = [row for row in rows_of(tensors.entries) if match is None or match.search(row.name)]
    altogether, by_dtype = totals(rows)
    if as_json:
        document = {
            "file": file,
            "metadata": dict(tensors.metadata),
            "extras": _plain(tensors.extras),
            "total": vars(altogether),
            "dtypes": {dtype: vars(total) for dtype, total in by_dtype.items()},
            "tensors": [
                {"name": row.name, "dtype": row.dtype, "shape": row.shape, "nbytes": row.nbytes} for row in rows
            ],
        }
        json.dump(document, sys.stdout)
        sys.stdout.write("\n")
        return
    if rows:
        _print_rows(rows)
        click.echo()
    if match is not None:
        click.echo(f"{len(rows):,} of {count(len(tensors), 'tensor')} match")
    _print_totals(altogether, by_dtype)
    _print_pairs("metadata", tensors.metadata)
    _print_pairs("also in the file", tensors.extras)


def _print_rows(rows: list[Row]) -> None:
    from nvflare_lazy._text import format_size

    cells = [[printable(row.name), row.dtype, str(list(row.shape)), format_size(row.nbytes)] for row in rows]
    _print_table([["NAME", "DTYPE", "SHAPE", "SIZE"], *cells], right={3})


def _print_totals(altogether: Total, by_dtype: dict[str, Total]) -> None:
    from nvflare_lazy._text import format_size

    totals = [*sorted(by_dtype.items(), key=lambda item: -item[1].nbytes), ("total", altogether)]
    cells = [[name, f"{total.tensors:,}", f"{total.elements:,}", format_size(total.nbytes)] for name, total in totals]
    _print_table([["DTYPE", "TENSORS", "ELEMENTS", "SIZE"], *cells], right={1, 2, 3})


def _print_table(cells: list[list[str]], right: set[int]) -> None:
    head, *body = columns(cells, right)
    click.secho(head, bold=True)
    sys.stdout.writelines(f"{line}\n" for line in body)


def _print_pairs(what: str, pairs: Mapping[str, Any]) -> None:
    if pairs:
        click.echo(f"\n{what}")
    for key, value in pairs.items():
        text = printable(value if isinstance(value, str) else reprlib.repr(value))
        click.echo(f"  {printable(key)}: {text[:_LONGEST_VALUE]}{'...' if len(text) > _LONGEST_VALUE else ''}")


def _plain(value: object) -> object:
    """Return what JSON can hold of a checkpoint's extras, and the rest in words."""
    if isinstance(value, (str, int, type(None))) or (isinstance(value, float) and isfinite(value)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return reprlib.repr(value)
