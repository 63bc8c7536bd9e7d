# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy clean`: list scratch directories, and remove those of processes that no longer exist.

The next job with the same scratch root also removes them; this command is for machines that run no job soon.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from nvflare_lazy._text import format_size, printable
from nvflare_lazy.cli._common import columns, count, json_option, print_json

if TYPE_CHECKING:
    from nvflare_lazy.scratch import LeaseInfo

_STATUSES = {True: "running", False: "gone", None: "unknown"}


@click.command(
    short_help="List scratch, and remove that of processes that no longer exist.",
    epilog="Example: nvflare-lazy clean --remove",
)
@click.option("--scratch-dir", type=click.Path(), help="Scratch root. Default: the current user's.")
@click.option("--remove", is_flag=True, help="Remove scratch of processes that no longer exist. Default: list it.")
@click.option(
    "--include-other-hosts",
    is_flag=True,
    help="With --remove, also remove scratch of other hosts, whose processes cannot be checked from here.",
)
@json_option
def clean(scratch_dir: str | None, remove: bool, include_other_hosts: bool, as_json: bool) -> None:
    """List scratch directories, and remove those of processes that no longer exist.

    The scratch of a running process is never removed.
    """
    from nvflare_lazy.scratch import list_scratch, reclaim

    if include_other_hosts and not remove:
        raise click.UsageError("--include-other-hosts requires --remove.")
    reclaimed = reclaim(scratch_dir, include_other_hosts=include_other_hosts) if remove else []
    leases = list_scratch(scratch_dir)
    if as_json:
        print_json({"removed": [*map(_as_dict, reclaimed)], "scratch": [*map(_as_dict, leases)]})
        return
    if remove:
        for gone in reclaimed:
            click.echo(f"Removed {gone.path}: {format_size(gone.nbytes)}, job {printable(gone.job)!r}, {gone.reason}")
        total = sum(gone.nbytes for gone in reclaimed)
        click.echo(f"Removed {count(len(reclaimed), 'directory', 'directories')}, {format_size(total)}.")
    if not leases:
        click.echo("No scratch directories found.")
        return
    rows = [["STATUS", "SIZE", "AGE", "JOB", "OWNER", "PATH"]]
    rows += [
        [
            _STATUSES[lease.alive],
            format_size(lease.nbytes),
            _age(lease.age),
            printable(lease.job),
            printable(lease.owner),
            str(lease.path),
        ]
        for lease in leases
    ]
    for line in columns(rows, right={1, 2}):
        click.echo(line)
    left = [lease for lease in leases if lease.alive is False]
    if left and not remove:
        size = format_size(sum(lease.nbytes for lease in left))
        click.echo(f"{size} is left from processes that no longer exist; free it with: nvflare-lazy clean --remove")


def _as_dict(lease: LeaseInfo) -> dict[str, Any]:
    return {**asdict(lease), "path": str(lease.path), "status": _STATUSES[lease.alive]}


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
