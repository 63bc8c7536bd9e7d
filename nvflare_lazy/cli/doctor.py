# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy doctor`: whether this machine, and a site on it, is ready for a job."""

from __future__ import annotations

from pathlib import Path

import click

from nvflare_lazy.cli.wording import printable


@click.command()
@click.option("--scratch", "scratch_dir", type=click.Path(), help="The scratch root the job will use.")
@click.option("--site", type=click.Path(), help="Folder of a provisioned server or site, to check what it allows.")
@click.pass_context
def doctor(context: click.Context, scratch_dir: str | None, site: str | None) -> None:
    """Check a machine before a job runs on it.

    Versions, NVFlare's handlers, the scratch root (space, speed, whether it is memory), the limits of processes, and
    with --site the list of classes that jobs may name there.

    The exit code is 1 if anything is a PROBLEM.
    """
    from nvflare_lazy.flare.checkup import PROBLEM, examine

    problems = 0
    for finding in examine(scratch_dir, None if site is None else Path(site)):
        problems += finding.level == PROBLEM
        click.echo(f"{finding.level:8} {printable(finding.what)}")
    context.exit(1 if problems else 0)
