# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy convert`: write any checkpoint as safetensors.

Copies a tile at a time, so the model need not fit in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nvflare_lazy.cli._common import (
    dtype_option,
    json_option,
    like_option,
    max_shard_size_option,
    resolve_output,
    save_and_print,
    section_option,
)

if TYPE_CHECKING:
    import torch

    from nvflare_lazy.formats.hugging_face import ModelDirectory


@click.command(epilog="Example: nvflare-lazy convert training.pt model.safetensors --section model --dtype bf16")
@click.argument("source", metavar="INPUT", type=click.Path())
@click.argument("target", metavar="OUTPUT", type=click.Path())
@section_option
@dtype_option
@max_shard_size_option
@like_option
@click.option("--force", is_flag=True, help="Replace OUTPUT if it exists.")
@json_option
def convert(
    source: str,
    target: str,
    section: str | None,
    dtype: torch.dtype | None,
    max_shard_size: int | None,
    like: ModelDirectory | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a checkpoint as safetensors.

    INPUT is a safetensors file, the index or directory of a sharded checkpoint, or a PyTorch checkpoint. OUTPUT is
    NAME.safetensors, or a directory, which gets a model.safetensors. A missing directory is created. OUTPUT may be a
    URL, such as s3://bucket/model.safetensors.

    Memory use does not depend on the size of the checkpoint. OUTPUT is written atomically.
    """
    target = resolve_output(target, "OUTPUT", force=force, like=like)

    import nvflare_lazy

    tensors = nvflare_lazy.open(source, section=section)
    save_and_print(
        tensors, target, "Converting", dtype=dtype, max_shard_size=max_shard_size, like=like, as_json=as_json
    )
