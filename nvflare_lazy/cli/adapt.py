# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy adapt`: make an NVFlare job folder lazy.

Rewrites the configurations of the job and runs nothing in it.
"""

from __future__ import annotations

import click

from nvflare_lazy._text import printable
from nvflare_lazy.cli._common import count, json_option, print_json

_LEVELS = ("1", "2", "3")


@click.command(epilog="Example: nvflare-lazy adapt jobs/fedavg --level 2 --dry-run")
@click.argument("job_dir", metavar="JOB_DIR", type=click.Path(exists=True, file_okay=False))
@click.option(
    "--level",
    type=click.Choice(_LEVELS),
    default="3",
    show_default=True,
    help="1: receive results on disk. 2: also replace aggregation and persistor. 3: also receive on disk on clients.",
)
@click.option(
    "--install-in-trainers",
    is_flag=True,
    help="Let external trainers run nvflare_lazy.install() before the training script.",
)
@click.option("--out", metavar="DIR", type=click.Path(), help="Write the job to this new folder. Default: in place.")
@click.option("--dry-run", is_flag=True, help="Print the changes, and write nothing.")
@json_option
def adapt(job_dir: str, level: str, install_in_trainers: bool, out: str | None, dry_run: bool, as_json: bool) -> None:
    """Make an NVFlare job folder lazy.

    JOB_DIR has a meta.json and the apps of the job, for example from recipe.export. Components of NVFlare are replaced
    by ours, with their arguments, and the changes are printed as a diff. Your own classes are kept. If a component has
    no counterpart, the reason is printed and nothing is written. A job that has the level is not changed.
    """
    from pathlib import Path

    from nvflare_lazy.flare.adaptation.component_mapping import AdaptationOptions
    from nvflare_lazy.flare.adaptation.job_folder import adapt_job

    job = adapt_job(job_dir, int(level), AdaptationOptions(install_in_trainers=install_in_trainers))
    if job.changed and not as_json:
        click.echo("\n".join("\t".join(map(printable, line.split("\t"))) for line in job.diff().splitlines()))
    if not dry_run and (job.changed or out):
        job.write(None if out is None else Path(out))
    if as_json:
        print_json(
            {
                "job_dir": job_dir,
                "out": out or job_dir,
                "level": int(level),
                "changed": [str(path) for path in job.changed],
                "written": not dry_run and bool(job.changed or out),
                "diff": job.diff(),
                "notes": job.notes,
            }
        )
        return
    for note in job.notes:
        click.echo(f"Note: {printable(note)}", err=True)
    what = f"{count(len(job.changed), 'file')} changed" if job.changed else "nothing to change"
    click.echo(f"{printable(out or job_dir)}: level {level}, {what}{', nothing written' if dry_run else ''}", err=True)
    if job.changed:
        click.echo(
            "Install nvflare-lazy on the sites that run these components. Sites without custom code also need "
            '"nvflare_lazy." in their class_allow_list.',
            err=True,
        )
