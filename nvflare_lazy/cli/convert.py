# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy convert`: write any checkpoint as safetensors.

Copies a tile at a time, so the model need not fit in memory.
"""

from __future__ import annotations

import click

from nvflare_lazy._text import format_size
from nvflare_lazy.cli._common import count, display_path, printable, progress, resolve_output, section_option, size

# The names of torch, since the help must not load torch.
_DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
}


@click.command()
@click.argument("source", metavar="INPUT", type=click.Path())
@click.argument("target", metavar="OUTPUT", type=click.Path())
@section_option
@click.option(
    "--dtype",
    type=click.Choice(list(_DTYPES), case_sensitive=False),
    help="Cast floating-point tensors to this type; other tensors are unchanged.",
)
@click.option("--max-shard-size", metavar="SIZE", callback=size, help="Split larger checkpoints, for example 5GiB.")
@click.option("--force", is_flag=True, help="Replace OUTPUT if it exists.")
def convert(
    source: str, target: str, section: str | None, dtype: str | None, max_shard_size: int | None, force: bool
) -> None:
    """Write a checkpoint as safetensors.

    INPUT is a safetensors file, the index or directory of a sharded checkpoint, or a PyTorch checkpoint. OUTPUT is
    NAME.safetensors, or a directory, which gets a model.safetensors.

    Memory use does not depend on the size of the checkpoint. OUTPUT is written atomically.
    """
    target = resolve_output(target, "OUTPUT", force=force)

    import torch

    import nvflare_lazy
    from nvflare_lazy.formats.save_checkpoint import tensor_meta

    tensors = nvflare_lazy.open(source, section=section)
    to_dtype = getattr(torch, _DTYPES[dtype]) if dtype else None
    nbytes = sum(tensor_meta(name, entry, dtype=to_dtype).nbytes for name, entry in tensors.entries.items())
    with progress("Converting", nbytes) as done:
        saved = nvflare_lazy.save(tensors, target, max_shard_size=max_shard_size, dtype=to_dtype, progress=done)
    click.echo(f"{printable(display_path(saved, target))}: {count(len(tensors), 'tensor')}, {format_size(nbytes)}")
    if tensors.extras:
        skipped = ", ".join(printable(name) for name in tensors.extras)
        click.echo(f"Skipped, not tensors: {skipped}", err=True)
