# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy aggregate`: one model of many, by any rule, within a memory budget.

The engine of the server on the command line, for checkpoints that are at hand: to try a rule, or to repeat a round.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvflare_lazy._text import format_size
from nvflare_lazy.cli._common import count, error_line, free_target, printable, progress, regex, shown, size

if TYPE_CHECKING:
    import re
    from collections.abc import Callable

    from nvflare_lazy.aggregation import AggregationReport, Progress


def _parameters(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    """Click callback: return NAME=VALUE pairs as a dictionary."""
    parameters = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"{text!r} is not of the form NAME=VALUE.")
        try:
            parameters[name] = json.loads(value)
        except ValueError:
            raise click.BadParameter(f"{value!r} is no number.") from None
    return parameters


def _weights(context: click.Context, parameter: click.Parameter, value: str | None) -> list[float] | None:
    """Click callback: return a comma-separated list of numbers."""
    try:
        return None if value is None else [float(number) for number in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of numbers such as 300,120,50.") from None


@click.command()
@click.argument("sources", metavar="IN...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--out",
    required=True,
    metavar="FILE_OR_DIR",
    type=click.Path(),
    help="Where the result goes: NAME.safetensors, or a directory.",
)
@click.option(
    "--rule",
    default="mean",
    show_default=True,
    metavar="NAME",
    help="mean, median, trimmed_mean, krum, multi_krum, bulyan, geometric_median or clipped_mean.",
)
@click.option(
    "--set",
    "parameters",
    multiple=True,
    callback=_parameters,
    metavar="NAME=VALUE",
    help="A parameter of the rule, for example byzantine=2; may be given again.",
)
@click.option("--weights", callback=_weights, metavar="W,W,...", help="How much each IN counts, in their order.")
@click.option("--diff", is_flag=True, help="The IN are differences from a model, and so is the result.")
@click.option("--reference", metavar="MODEL", type=click.Path(), help="The model that the IN were trained from.")
@click.option("--memory", default="256MiB", show_default=True, callback=size, metavar="SIZE", help="Memory to use.")
@click.option(
    "--threads", type=click.IntRange(min=1), metavar="N", help="Threads to use; one for each core by default."
)
@click.option("--exclude", callback=regex, metavar="REGEX", help="Leave out tensors in whose name this is found.")
@click.option("--leave-out", is_flag=True, help="Go on without an IN that does not fit to the others, or holds NaN.")
@click.option("--max-shard-size", metavar="SIZE", callback=size, help="Split a larger result, for example than 5GiB.")
@click.option("--force", is_flag=True, help="Replace the result if it exists.")
def aggregate(
    sources: tuple[str, ...],
    out: str,
    rule: str,
    parameters: dict[str, Any],
    weights: list[float] | None,
    diff: bool,
    reference: str | None,
    memory: int,
    threads: int | None,
    exclude: re.Pattern[str] | None,
    leave_out: bool,
    max_shard_size: int | None,
    force: bool,
) -> None:
    """Make one model of many.

    Each IN is a checkpoint of any kind: a safetensors file, the index or the directory of a sharded one, or a PyTorch
    checkpoint. They count in the order of their names, whatever the order here, so the same IN give the same bytes.

    An IN that cannot be read to its end is left out whole; the exit code is 1 then. The result appears when all of it
    is on the disk, or not at all.
    """
    if len(set(sources)) < len(sources):
        raise click.UsageError("The same IN is given twice; to let it count more, use --weights.")
    if weights is not None and len(weights) != len(sources):
        raise click.UsageError(f"--weights has {len(weights)} numbers, but there are {len(sources)} IN.")
    target = free_target(out, "--out", force=force)

    import nvflare_lazy
    from nvflare_lazy.aggregation import Aggregation
    from nvflare_lazy.formats.shard_names import index_of

    try:
        aggregation = Aggregation(
            {"name": rule, **parameters},
            "DIFF" if diff else "FULL",
            memory_budget=memory,
            threads=threads,
            exclude=None if exclude is None else exclude.pattern,
            on_mismatch="leave_out" if leave_out else "error",
            on_non_finite="leave_out" if leave_out else "keep",
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    # Who was left out is said at the end, and not as a warning on the way.
    logging.getLogger("nvflare_lazy.aggregation").addHandler(logging.NullHandler())
    contributions = {source: nvflare_lazy.open(source) for source in sources}
    with ExitStack() as bars:
        result = aggregation.run(
            contributions,
            target,
            weights=None if weights is None else dict(zip(sources, weights, strict=True)),
            reference=None if reference is None else nvflare_lazy.open(reference),
            progress=_show(bars),
        )
    report = result.report
    real = os.path.realpath(target)
    saved = Path(real if os.path.exists(real) else index_of(real))
    click.echo(
        f"{printable(shown(saved, target))}: {rule} of {len(report.contributors)}, {count(report.tensors, 'tensor')}, "
        f"{format_size(report.nbytes)}"
    )
    _say_who_was_left_out(report)


def _show(bars: ExitStack) -> Callable[[Progress], None]:
    """Return what shows progress, with a bar for each pass over the contributions."""
    stage, seen = "", 0
    advance: Callable[[int], None]

    def show(report: Progress) -> None:
        nonlocal stage, seen, advance
        if report.stage != stage or report.done < seen:
            bars.close()
            stage, seen = report.stage, 0
            advance = bars.enter_context(progress(f"Reading for {stage}", report.total))
        advance(report.done - seen)
        seen = report.done

    return show


def _say_who_was_left_out(report: AggregationReport) -> None:
    from nvflare_lazy.errors import MismatchError, NonFiniteError, UnsupportedDtypeError, WeightError

    asked_for = (MismatchError, NonFiniteError, UnsupportedDtypeError, WeightError)
    for name, error in report.left_out.items():
        click.echo(f"Left out {printable(name)}: {error_line(error)}", err=True)
    if not all(isinstance(error, asked_for) for error in report.left_out.values()):
        raise click.exceptions.Exit(1)
