# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy clean`: what jobs keep on disk, and giving back what the dead ones left.

The next job does that by itself; this is for looking, and for a machine that no job will run on soon.
"""

from __future__ import annotations

import click

from nvflare_lazy._text import format_size
from nvflare_lazy.cli._common import columns, count, printable


@click.command()
@click.option("--root", type=click.Path(), help="The scratch root; without it, the one jobs of this user have.")
@click.option("--remove", is_flag=True, help="Remove what dead owners left. Without it, it is only shown.")
@click.option(
    "--other-hosts",
    is_flag=True,
    help="With --remove, also what belongs to other hosts. Nothing here can tell whether they still run.",
)
def clean(root: str | None, remove: bool, other_hosts: bool) -> None:
    """Show the scratch that jobs have, and remove that of dead ones.

    Scratch belongs to the process that leased it. What a living one has is never touched.
    """
    from nvflare_lazy.scratch import list_scratch, reclaim

    if other_hosts and not remove:
        raise click.UsageError("--other-hosts says what to remove: it needs --remove")
    if remove:
        reclaimed = reclaim(root, other_hosts=other_hosts)
        for gone in reclaimed:
            click.echo(f"removed {gone.path}: {format_size(gone.nbytes)}, job {printable(gone.job)!r}, {gone.reason}")
        total = sum(gone.nbytes for gone in reclaimed)
        click.echo(f"{count(len(reclaimed), 'lease')} of dead owners removed, {format_size(total)}")
    leases = list_scratch(root)
    if not leases:
        click.echo("No job has scratch here.")
        return
    names = {True: "alive", False: "dead", None: "unknown"}
    rows = [["OWNER", "SIZE", "AGE", "JOB", "WHO", "WHERE"]]
    rows += [
        [
            names[lease.alive],
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
    dead = [lease for lease in leases if lease.alive is False]
    if dead and not remove:
        total = sum(lease.nbytes for lease in dead)
        click.echo(f"{format_size(total)} of dead owners; give it back with: nvflare-lazy clean --remove")


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
