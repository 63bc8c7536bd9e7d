# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy report`: a page about a job, from the records in its run directories.

The job may be running, finished or killed, and the page can be opened on any machine.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import click

from nvflare_lazy._text import printable
from nvflare_lazy.cli._common import json_option, print_json


@click.command(
    short_help="Make an HTML page about a job.",
    epilog="Example: nvflare-lazy report /tmp/nvflare/simulation/hello --out hello.html",
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--job", metavar="ID", help="Job to report, by the beginning of its id. Default: the newest job in RUN.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("nvflare_lazy_report.html"),
    show_default=True,
    help="File of the page; it is replaced if it exists.",
)
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Also draw the charts as a picture.")
@json_option
def report(run: Path, job: str | None, out: Path, png: Path | None, as_json: bool) -> None:
    """Make an HTML page about a job: memory, disk, time, traffic, clients and the model.

    RUN is a workspace (simulator, POC or production site), a run directory, a downloaded job, a zip file of one of
    them, or a file nvflare_lazy.jsonl. The job may be running. With --json, no page is written.
    """
    from nvflare_lazy.report import answers, read_job, summarize

    found = summarize(read_job(run, job))
    if as_json:
        numbers = {**asdict(found), "answers": {answer.name: answer.text for answer in answers(found)}}
        print_json(numbers)
        if png is None:
            return
    if find_spec("matplotlib") is None:
        raise click.ClickException(
            "Charts require matplotlib; install it with: pip install 'nvflare-lazy[report]'. "
            "To print the numbers without it, set --json."
        )
    from nvflare_lazy.report import charts, page

    if png is not None:
        _write(png, charts.png(found, [(answer.name, answer.text) for answer in answers(found)]))
    if as_json:
        return
    _write(out, page.page(found).encode("utf-8", "backslashreplace"))
    click.echo(f"Job {printable(found.job)}")
    for answer in answers(found):
        click.echo(f"  {answer.name + ':':21}{answer.text}")
    for path in filter(None, (out, png)):
        click.echo(f"Report: {printable(str(path.resolve()))}")


def _write(path: Path, content: bytes) -> None:
    """Replace a file atomically, since a browser may reload it at any time."""
    incomplete = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(incomplete, "xb") as file:
            file.write(content)
        os.replace(incomplete, path)
    finally:
        incomplete.unlink(missing_ok=True)
