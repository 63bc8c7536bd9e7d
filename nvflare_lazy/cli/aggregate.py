# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy aggregate`: aggregate checkpoints by any rule, within a memory budget.

Runs the engine of the server on the command line, to try a rule or to repeat a round.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvflare_lazy._text import format_size, printable
from nvflare_lazy.cli._common import (
    count,
    display_path,
    error_line,
    json_option,
    like_option,
    max_shard_size_option,
    print_json,
    progress,
    regex,
    resolve_output,
    size,
)

if TYPE_CHECKING:
    import re
    from collections.abc import Callable

    from nvflare_lazy.aggregation import AggregationReport, Progress
    from nvflare_lazy.formats.hugging_face import ModelDirectory


def _rule_args(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    """Click callback: convert NAME=VALUE pairs to a dictionary."""
    arguments = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"Invalid argument {text!r}: expected NAME=VALUE.")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            raise click.BadParameter(f"Invalid value {value!r}: expected a number.") from None
    return arguments


def _weights(context: click.Context, parameter: click.Parameter, value: str | None) -> list[float] | None:
    """Click callback: convert a comma-separated list of numbers."""
    try:
        return None if value is None else [float(number) for number in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"Invalid weights {value!r}: expected numbers such as 300,120,50.") from None


@click.command(
    epilog="Example: nvflare-lazy aggregate a.safetensors b.safetensors --weights 300,120 --out mean.safetensors"
)
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--out",
    required=True,
    metavar="FILE_OR_DIR",
    type=click.Path(),
    help="Output: NAME.safetensors, or a directory, which is created if it is missing; or the URL of either.",
)
@click.option(
    "--rule",
    default="mean",
    show_default=True,
    metavar="NAME",
    help="mean, median, trimmed_mean, krum, multi_krum, bulyan, geometric_median or clipped_mean.",
)
@click.option(
    "--rule-arg",
    "rule_args",
    multiple=True,
    callback=_rule_args,
    metavar="NAME=VALUE",
    help="Argument of the rule, for example num_byzantine=2. Can be repeated.",
)
@click.option("--weights", callback=_weights, metavar="W,W,...", help="Comma-separated weights, one per INPUT.")
@click.option(
    "--params-type",
    type=click.Choice(["full", "diff"], case_sensitive=False),
    default="full",
    show_default=True,
    help="Whether the INPUTS, and the result, are full models or differences from one.",
)
@click.option("--reference", metavar="MODEL", type=click.Path(), help="The model that the INPUTS were trained from.")
@click.option(
    "--memory-budget", default="256MiB", show_default=True, callback=size, metavar="SIZE", help="Memory to use."
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads to use. Default: one per core, or one per worker.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes that compute parts of the output, each with its own memory budget and one thread. Default: none.",
)
@click.option("--exclude", callback=regex, metavar="REGEX", help="Exclude tensors whose names match REGEX.")
@click.option("--skip-invalid", is_flag=True, help="Skip INPUTS that do not match the others or contain NaN.")
@max_shard_size_option
@like_option
@click.option("--force", is_flag=True, help="Replace the output if it exists.")
@json_option
def aggregate(
    inputs: tuple[str, ...],
    out: str,
    rule: str,
    rule_args: dict[str, Any],
    weights: list[float] | None,
    params_type: str,
    reference: str | None,
    memory_budget: int,
    threads: int | None,
    workers: int | None,
    exclude: re.Pattern[str] | None,
    skip_invalid: bool,
    max_shard_size: int | None,
    like: ModelDirectory | None,
    force: bool,
    as_json: bool,
) -> None:
    """Aggregate several checkpoints into one.

    Each INPUT is a safetensors file, the index or directory of a sharded checkpoint, or a PyTorch checkpoint. Inputs
    are processed in name order, so the result does not depend on the argument order.

    An INPUT that cannot be read completely is skipped, and the exit code is 1. The output is written atomically. The
    output may be a URL, such as s3://bucket/model.safetensors.
    """
    from nvflare_lazy.remote.url import display, is_url

    # The result names its contributors, and must not contain the signature of a URL.
    names = [display(source) if is_url(source) else source for source in inputs]
    if len(set(names)) < len(names):
        raise click.UsageError("The same INPUT is given twice; set --weights to give it more weight.")
    if weights is not None and len(weights) != len(inputs):
        raise click.UsageError(f"--weights has {len(weights)} numbers for {len(inputs)} INPUTS.")
    target = resolve_output(out, "--out", force=force, like=like)

    import nvflare_lazy
    from nvflare_lazy.aggregation import Aggregation
    from nvflare_lazy.formats.safetensors.shards import index_path
    from nvflare_lazy.formats.safetensors.writer import checkpoint_path

    try:
        aggregation = Aggregation(
            {"name": rule, **rule_args},
            "DIFF" if params_type == "diff" else "FULL",
            memory_budget=memory_budget,
            threads=threads,
            exclude=None if exclude is None else exclude.pattern,
            on_mismatch="skip" if skip_invalid else "error",
            on_non_finite="skip" if skip_invalid else "keep",
            max_shard_size=max_shard_size,
            like=like,
            executor=None if workers is None else {"name": "processes", "max_workers": workers},
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    # Skipped inputs are printed at the end instead of logged as warnings.
    logging.getLogger("nvflare_lazy.aggregation").addHandler(logging.NullHandler())
    contributions = {name: nvflare_lazy.open(source) for name, source in zip(names, inputs, strict=True)}
    with ExitStack() as bars:
        result = aggregation.run(
            contributions,
            target,
            weights=None if weights is None else dict(zip(names, weights, strict=True)),
            reference=None if reference is None else nvflare_lazy.open(reference),
            progress=_progress_bars(bars),
        )
    report = result.report
    saved = checkpoint_path(target, like)
    if max_shard_size is not None and report.nbytes > max_shard_size:
        saved = index_path(saved)
    path = display_path(saved if is_url(target) else Path(os.path.realpath(saved)), target)
    if as_json:
        print_json({"path": path, **report.as_dict()})
    else:
        click.echo(
            f"{printable(path)}: {rule} of {len(report.contributors)}, "
            f"{count(report.tensors, 'tensor')}, {format_size(report.nbytes)}"
        )
    _print_skipped(report)


def _progress_bars(bars: ExitStack) -> Callable[[Progress], None]:
    """Return a callback that shows one progress bar for each pass over the inputs."""
    stage, seen = "", 0
    advance: Callable[[int], None]

    def show(report: Progress) -> None:
        nonlocal stage, seen, advance
        if report.stage != stage or report.done < seen:
            bars.close()
            stage, seen = report.stage, 0
            what = "Uploading" if stage == "upload" else f"Reading for {stage}"
            advance = bars.enter_context(progress(what, report.total))
        advance(report.done - seen)
        seen = report.done

    return show


def _print_skipped(report: AggregationReport) -> None:
    from nvflare_lazy.errors import MismatchError, NonFiniteError, UnsupportedDtypeError, WeightError

    requested = (MismatchError, NonFiniteError, UnsupportedDtypeError, WeightError)
    for name, error in report.skipped.items():
        click.echo(f"Skipped {printable(name)}: {error_line(error)}", err=True)
    if not all(isinstance(error, requested) for error in report.skipped.values()):
        raise click.exceptions.Exit(1)
