# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy convert`: any checkpoint as safetensors, however large.

Copies a tile at a time from one file to the other, so a model that does not fit into memory is converted all the same.
"""

from __future__ import annotations

import click

from nvflare_lazy._text import format_size
from nvflare_lazy.cli._common import count, free_target, printable, progress, section_option, shown, size

# Torch's names of what can be asked for; torch itself is not loaded to say no.
_DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
}


@click.command()
@click.argument("source", metavar="IN", type=click.Path())
@click.argument("target", metavar="OUT", type=click.Path())
@section_option
@click.option(
    "--dtype",
    type=click.Choice(list(_DTYPES), case_sensitive=False),
    help="Cast floating-point tensors; integers and booleans stay what they are.",
)
@click.option("--max-shard-size", metavar="SIZE", callback=size, help="Split what is larger, for example than 5GiB.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def convert(
    source: str, target: str, section: str | None, dtype: str | None, max_shard_size: int | None, force: bool
) -> None:
    """Write a checkpoint as safetensors.

    IN is of any kind: a safetensors file, the index or the directory of a sharded one, or a PyTorch checkpoint. OUT
    is a file, NAME.safetensors, or a directory, which gets a model.safetensors.

    A large checkpoint takes no more memory than a small one. OUT appears when all of it is on the disk, or not at all.
    """
    target = free_target(target, "OUT", force=force)

    import torch

    import nvflare_lazy
    from nvflare_lazy.formats.tensor_content import meta_of

    tensors = nvflare_lazy.open(source, section=section)
    to_dtype = getattr(torch, _DTYPES[dtype]) if dtype else None
    nbytes = sum(meta_of(name, entry, dtype=to_dtype).nbytes for name, entry in tensors.entries.items())
    with progress("Converting", nbytes) as done:
        saved = nvflare_lazy.save(tensors, target, max_shard_size=max_shard_size, dtype=to_dtype, progress=done)
    click.echo(f"{printable(shown(saved, target))}: {count(len(tensors), 'tensor')}, {format_size(nbytes)}")
    if tensors.extras:
        left_out = ", ".join(printable(name) for name in tensors.extras)
        click.echo(f"Left out, being no tensors: {left_out}", err=True)
