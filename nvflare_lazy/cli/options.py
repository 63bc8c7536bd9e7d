# SPDX-License-Identifier: Apache-2.0
"""The arguments and options that several subcommands have in common, so that they are the same in all of them."""

from __future__ import annotations

import re

import click

from nvflare_lazy._text import parse_size

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
