# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy plan`: print the disk, the memory and the traffic of a job for each process, before it runs.

Reads the headers of the model only. The formulas are in `job_plan`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvflare_lazy._text import format_size, printable
from nvflare_lazy.cli._common import columns, count, json_option, print_json, section_option, size

if TYPE_CHECKING:
    from nvflare_lazy.job_plan import JobPlan, ProcessDemand

_HOSTS = {"prod": "each site on its own host", "poc": "all sites on one host", "sim": "the simulator"}


@click.command(epilog="Example: nvflare-lazy plan model.safetensors --clients 10 --keep-rounds 2 --against /data")
@click.argument("model", type=click.Path())
@section_option
@click.option("--clients", type=click.IntRange(min=1), required=True, help="Clients that take part in a round.")
@click.option(
    "--level",
    type=click.IntRange(1, 3),
    default=3,
    show_default=True,
    help="1: receive results on disk. 2: also aggregate and save on disk. 3: also receive on disk on the clients.",
)
@click.option("--rule", default="mean", show_default=True, metavar="NAME", help="Aggregation rule.")
@click.option("--optimizer", metavar="NAME", help="Server optimizer: fedavgm, fedadagrad, fedadam or fedyogi.")
@click.option("--difference", is_flag=True, help="Clients send differences instead of models.")
@click.option(
    "--keep-rounds",
    type=click.IntRange(min=1),
    help="Rounds whose models are kept. Default: 2 with --checkpoint-dir, otherwise 1.",
)
@click.option("--external", is_flag=True, help="Training scripts are separate processes.")
@click.option("--install-in-trainers", is_flag=True, help="With --external: these scripts use nvflare-lazy.")
@click.option(
    "--env",
    type=click.Choice(list(_HOSTS)),
    default="prod",
    show_default=True,
    help="prod: each site on its own host. poc: all sites on one host. sim: the simulator.",
)
@click.option(
    "--memory-budget",
    default="128MiB",
    show_default=True,
    metavar="SIZE",
    callback=size,
    help="The memory_budget of the job.",
)
@click.option("--against", metavar="DIR", type=click.Path(), help="Check this machine, with scratch in DIR.")
@click.option(
    "--checkpoint-dir",
    metavar="DIR",
    type=click.Path(),
    help="Directory of the checkpoints. Default: on the disk of --against.",
)
@click.option(
    "--site",
    type=click.Choice(["server", "client"]),
    default="server",
    show_default=True,
    help="Site that this machine is for; with --env poc or sim, it is for all sites.",
)
@json_option
@click.pass_context
def plan(
    context: click.Context,
    /,
    model: str,
    section: str | None,
    keep_rounds: int | None,
    difference: bool,
    env: Any,
    against: str | None,
    checkpoint_dir: str | None,
    site: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan the disk, the memory and the traffic of a job.

    MODEL is the initial model: a checkpoint of any kind, or a Hugging Face directory. Tensor data is not read.

    Memory is the peak of anonymous memory of each process. A training script needs memory for its gradients, its
    optimizer and its activations in addition. Scratch and checkpoints are the peak of allocated space, traffic is for
    one round.

    With --against, the exit code is 1 if the machine has too little memory or disk space.
    """
    from nvflare_lazy.job_plan import JobOptions, JobPlan, ModelSize
    from nvflare_lazy.remote.url import display, is_url

    try:
        job = JobOptions(
            **options,
            sends_differences=difference,
            keep_rounds=keep_rounds or (1 if checkpoint_dir is None else 2),
            environment=env,
            separate_checkpoints=bool(against and checkpoint_dir and not _share_disk(against, checkpoint_dir)),
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    found = JobPlan.of(ModelSize.of(model, section), job)
    shortages = None if against is None else _shortages(found, against, checkpoint_dir, site)
    if as_json:
        document = {"file": display(model) if is_url(model) else model, **found.to_json()}
        if shortages is not None:
            document["shortages"] = shortages
        print_json(document)
    else:
        _print(found)
        for shortage in shortages or ():
            click.echo(f"\nToo small: {printable(shortage)}")
        if shortages == []:
            click.echo(f"\nThis machine has the memory and the disk space for {_whose(found, site)}.")
    context.exit(1 if shortages else 0)


def _print(found: JobPlan) -> None:
    model, job = found.model, found.options
    click.echo(
        f"Model: {format_size(model.nbytes)} in {count(model.tensors, 'tensor')}, "
        f"the largest {format_size(model.largest)}"
    )
    optimizer = f", {job.optimizer}" if job.optimizer else ""
    click.echo(
        f"Job: level {job.level}, {count(job.clients, 'client')}, {job.rule}{optimizer}; {_HOSTS[job.environment]}\n"
    )
    head = ["SITE", "PROCESS", "MEMORY", "SCRATCH", "CHECKPOINTS", "RECEIVED", "SENT"]
    rows = [head, *map(_row, found.processes)]
    for number, line in enumerate(columns(rows, right={2, 3, 4, 5, 6})):
        click.secho(line, bold=number == 0)
    if any(process.memory is None for process in found.processes):
        click.echo("\nunchanged: the process does not use nvflare-lazy and needs the memory that it needs without it.")


def _row(process: ProcessDemand) -> list[str]:
    sizes = (process.scratch, process.checkpoints, process.received, process.sent)
    return [
        "each client" if process.site == "client" else process.site,
        process.process,
        "unchanged" if process.memory is None else format_size(process.memory),
        *(format_size(nbytes) if nbytes else "-" for nbytes in sizes),
    ]


def _share_disk(one: str, other: str) -> bool:
    from nvflare_lazy.scratch.file_systems import inspect_root

    return inspect_root(one).path.stat().st_dev == inspect_root(other).path.stat().st_dev


def _shortages(found: JobPlan, against: str, checkpoint_dir: str | None, site: str) -> list[str]:
    from nvflare_lazy.scratch.container import find_shortages

    host = None if found.options.is_one_host else site
    storage = {Path(against): found.scratch(host)}
    checkpoints = Path(checkpoint_dir or against)
    storage[checkpoints] = storage.get(checkpoints, 0) + found.checkpoints(host)
    return find_shortages(found.memory(host), storage)


def _whose(found: JobPlan, site: str) -> str:
    is_one_host = found.options.is_one_host
    whose = "all sites of this job" if is_one_host else f"a {site} of this job"
    if any(process.memory is None for process in found.processes if is_one_host or process.site == site):
        whose += "; the memory of unchanged processes is not included"
    return whose
