# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy inspect`: list the contents of a checkpoint.

Reads headers and pickles, never tensor data, so it takes as long for a hundred gigabytes as for one.
"""

from __future__ import annotations

import json
import sys
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from nvflare_lazy._text import format_size, printable, quoted
from nvflare_lazy.cli._common import columns, count, json_option, print_json, regex, section_option

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping

    from nvflare_lazy.tensors.entry import TensorEntry

_MAX_VALUE_LEN = 200
#: Precedes the keys of the metadata that this package writes, whose values are JSON.
PREFIX = "nvflare_lazy."


class Row(NamedTuple):
    """One tensor of a checkpoint.

    Its dtype has the name that safetensors gives it, or else torch; its shape counts elements of that type.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@click.command(epilog="Example: nvflare-lazy inspect training.pt --section model --match attention")
@click.argument("file", type=click.Path())
@section_option
@click.option("--match", metavar="REGEX", callback=regex, help="Show only tensors whose names match REGEX.")
@json_option
def inspect(file: str, section: str | None, match: re.Pattern[str] | None, as_json: bool) -> None:
    """List the tensors of a checkpoint.

    FILE is a safetensors file, the index or directory of a sharded checkpoint, or a PyTorch checkpoint. Tensor data is
    not read.

    A model of a job has its provenance: job, round, contributors and their weights, rule, and the initial model.
    """
    import nvflare_lazy
    from nvflare_lazy.remote.url import display, is_url

    tensors = nvflare_lazy.open(file, section=section)
    rows = [_row(name, entry) for name, entry in tensors.entries.items() if match is None or match.search(name)]
    total = _sum(rows)
    dtypes = dict.fromkeys(row.dtype for row in rows)
    by_dtype = {dtype: _sum([row for row in rows if row.dtype == dtype]) for dtype in dtypes}
    provenance, other = _provenance(tensors.metadata)
    if as_json:
        document = {
            "file": display(file) if is_url(file) else file,
            "metadata": dict(tensors.metadata),
            "provenance": provenance,
            "extras": tensors.extras,
            "total": total,
            "dtypes": by_dtype,
            "tensors": [row._asdict() for row in rows],
        }
        print_json(document)
        return
    if rows:
        cells = [[printable(row.name), row.dtype, str(list(row.shape)), format_size(row.nbytes)] for row in rows]
        _print_table([["NAME", "DTYPE", "SHAPE", "SIZE"], *cells], right={3})
        click.echo()
    if match is not None:
        click.echo(f"{len(rows):,} of {count(len(tensors), 'tensor')} match")
    totals = [*sorted(by_dtype.items(), key=lambda item: -item[1]["nbytes"]), ("total", total)]
    cells = [
        [name, f"{sums['tensors']:,}", f"{sums['elements']:,}", format_size(sums["nbytes"])] for name, sums in totals
    ]
    _print_table([["DTYPE", "TENSORS", "ELEMENTS", "SIZE"], *cells], right={1, 2, 3})
    _print_pairs("provenance", provenance)
    _print_pairs("metadata", other)
    _print_pairs("also in the file", tensors.extras)


def _provenance(metadata: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what this package has stored about the origin of a model, and the rest of the metadata."""
    found, other = {}, {}
    for key, text in metadata.items():
        try:
            part = json.loads(text) if key.startswith(PREFIX) else None
        except (ValueError, RecursionError):
            part = None
        if isinstance(part, dict):
            found.update(part)
        else:
            other[key] = text
    return found, other


def _row(name: str, entry: TensorEntry) -> Row:
    element_type, shape = entry.element_type, entry.shape
    if element_type.packed != 1 and shape:
        # torch counts the bytes that several elements share.
        shape = (*shape[:-1], shape[-1] * element_type.packed)
    return Row(name, element_type.name or str(element_type.torch).removeprefix("torch."), shape, entry.nbytes)


def _sum(rows: list[Row]) -> dict[str, int]:
    return {
        "tensors": len(rows),
        "elements": sum(prod(row.shape) for row in rows),
        "nbytes": sum(row.nbytes for row in rows),
    }


def _print_table(cells: list[list[str]], right: set[int]) -> None:
    head, *body = columns(cells, right)
    click.secho(head, bold=True)
    sys.stdout.writelines(f"{line}\n" for line in body)


def _print_pairs(what: str, pairs: Mapping[str, Any]) -> None:
    if pairs:
        click.echo(f"\n{what}")
    for key, value in pairs.items():
        text = printable(value if isinstance(value, str) else quoted(value))
        click.echo(f"  {printable(key)}: {text[:_MAX_VALUE_LEN]}{'...' if len(text) > _MAX_VALUE_LEN else ''}")
