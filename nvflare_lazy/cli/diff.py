# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy diff`: compare two checkpoints tensor by tensor, in one pass over both.

Reads both a block at a time, so the models need not fit in memory.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from nvflare_lazy._text import printable
from nvflare_lazy.cli._common import columns, count, json_option, print_json, progress, regex, section_option

if TYPE_CHECKING:
    import re
    from collections.abc import Sequence

    from nvflare_lazy.aggregation.comparison import Comparison, TensorDifference
    from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
    from nvflare_lazy.tensors.entry import TensorEntry

_MAX_ROWS = 20


def _tolerance(context: click.Context, parameter: click.Parameter, value: str | None) -> dict[str, float] | None:
    """Click callback: convert "1e-6" or "rtol=1e-5,atol=1e-8" to numbers."""
    if value is None:
        return None
    found: dict[str, float] = {}
    for part in value.split(","):
        name, equals, number = part.rpartition("=")
        name = name if equals else "atol"
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = -1.0
        if name not in ("rtol", "atol") or not 0 <= found[name] < math.inf:
            raise click.BadParameter(f"Invalid tolerance {part!r}: expected a number, atol=NUMBER or rtol=NUMBER.")
    return found


@click.command(epilog="Example: nvflare-lazy diff before.safetensors after.pt --section model --tolerance rtol=1e-5")
@click.argument("a", metavar="A", type=click.Path())
@click.argument("b", metavar="B", type=click.Path())
@section_option
@click.option("--match", metavar="REGEX", callback=regex, help="Compare only tensors whose names match REGEX.")
@click.option(
    "--tolerance",
    metavar="NUMBERS",
    callback=_tolerance,
    help="Accept |A - B| <= atol + rtol * |B|, for example 1e-6 (atol), rtol=1e-5 or rtol=1e-5,atol=1e-8. Then, types "
    "may differ.",
)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Threads to use. Default: one per core.")
@json_option
@click.pass_context
def diff(
    context: click.Context,
    a: str,
    b: str,
    section: str | None,
    match: re.Pattern[str] | None,
    tolerance: dict[str, float] | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Compare two checkpoints, tensor by tensor.

    A and B are safetensors files, indexes or directories of sharded checkpoints, or PyTorch checkpoints. Lists the
    tensors that only one of them has, and the different ones, the largest absolute difference first. Differences are
    relative to B. A checkpoint without the --section is compared whole, if the other one has it.

    The exit code is 0 if both are the same, and 1 if they differ.
    """
    from nvflare_lazy.aggregation.comparison import Tolerance, compare
    from nvflare_lazy.remote.url import display, is_url

    models = [_matching(model, match) for model in _open(a, b, section)]
    a, b = (display(path) if is_url(path) else path for path in (a, b))
    if match is not None and not any(models):
        raise click.UsageError(f"--match {match.pattern!r} matches no tensor.")
    limit = None if tolerance is None else Tolerance(**tolerance)
    with progress("Comparing", sum(entry.nbytes for model in models for entry in model.values())) as done:
        found = compare(models[0], models[1], limit, threads=threads, progress=done)
    if as_json:
        print_json({"a": a, "b": b, "same": found.same, "tolerance": tolerance, **asdict(found)})
    else:
        _print(found, a, b)
    context.exit(0 if found.same else 1)


def _open(a: str, b: str, section: str | None) -> list[LazyTensorDict]:
    import nvflare_lazy
    from nvflare_lazy.errors import SectionError

    opened, missing = [], []
    for path in (a, b):
        try:
            opened.append(nvflare_lazy.open(path, section=section))
        except SectionError as error:
            missing.append(error)
            opened.append(nvflare_lazy.open(path))
    if len(missing) == 2:
        raise missing[0]
    return opened


def _matching(model: LazyTensorDict, match: re.Pattern[str] | None) -> dict[str, TensorEntry]:
    return {name: entry for name, entry in model.entries.items() if match is None or match.search(name)}


def _print(found: Comparison, a: str, b: str) -> None:
    different = [tensor for tensor in found.tensors if not tensor.same]
    if different:
        _print_table(different)
    for path, names in ((a, found.only_in_a), (b, found.only_in_b)):
        for name in names[:_MAX_ROWS]:
            click.echo(f"Only in {printable(path)}: {printable(name)}")
        _print_rest(len(names))
    click.echo(
        f"{count(len(found.tensors), 'tensor')} compared, {len(different):,} different; only in A: "
        f"{len(found.only_in_a):,}, only in B: {len(found.only_in_b):,}"
    )


def _print_table(different: Sequence[TensorDifference]) -> None:
    head = ["TENSOR", "DTYPE", "SHAPE", "DIFFERENT", "MAX ABS", "MEAN ABS", "MAX REL", "MEAN REL", "ULPS", "COSINE"]
    has_non_finite = any((*tensor.nan, *tensor.inf) != (0, 0, 0, 0) for tensor in different)
    rows = [[*head, "NAN", "INF"]] if has_non_finite else [head]
    for tensor in different[:_MAX_ROWS]:
        cells = [printable(tensor.name), _both(*tensor.dtypes), _both(*(str([*shape]) for shape in tensor.shapes))]
        numbers = (tensor.max_abs, tensor.mean_abs, tensor.max_rel, tensor.mean_rel)
        cells += [f"{tensor.different:,}", *("-" if number is None else f"{number:.2e}" for number in numbers)]
        cells.append("-" if tensor.max_ulps is None else f"{tensor.max_ulps:,}")
        cells.append("-" if tensor.cosine is None else f"{tensor.cosine:.6f}")
        if has_non_finite:
            cells += [_both(*map(str, tensor.nan)), _both(*map(str, tensor.inf))]
        rows.append(cells)
    for line in columns(rows, right=range(3, len(rows[0]))):
        click.echo(line)
    _print_rest(len(different))


def _both(a: str, b: str) -> str:
    return a if a == b else f"{a} -> {b}"


def _print_rest(number: int) -> None:
    if number > _MAX_ROWS:
        click.echo(f"... and {number - _MAX_ROWS:,} more, which --json lists")
