# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy merge-lora`: merge a LoRA adapter into the weights of its base model.

Merges one matrix at a time, so the model need not fit in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nvflare_lazy.cli._common import (
    HuggingFaceDirectory,
    dtype_option,
    json_option,
    max_shard_size_option,
    resolve_output,
    save_and_print,
)

if TYPE_CHECKING:
    import torch


@click.command(
    "merge-lora", epilog="Example: nvflare-lazy merge-lora models/base models/adapter models/merged --dtype bf16"
)
@click.argument("base", metavar="BASE", type=HuggingFaceDirectory())
@click.argument("adapter", metavar="ADAPTER", type=HuggingFaceDirectory())
@click.argument("out", metavar="OUT", type=click.Path())
@dtype_option
@max_shard_size_option
@click.option("--force", is_flag=True, help="Replace the model in OUT if it exists.")
@json_option
def merge_lora(
    base: str,
    adapter: str,
    out: str,
    dtype: torch.dtype | None,
    max_shard_size: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Merge a LoRA adapter into the weights of its base model.

    BASE is the Hugging Face directory of the model, ADAPTER that of the PEFT adapter. OUT is the directory to write.
    The configuration, tokenizer and similar files are copied from BASE.

    The result has the bits of PEFT's merge_and_unload(). Memory use depends on the largest matrix only.
    """
    from nvflare_lazy.formats.hugging_face import ModelDirectory
    from nvflare_lazy.formats.hugging_face.lora import merge_lora

    directory = ModelDirectory(base, adapter=False)
    target = resolve_output(out, "OUT", force=force, like=directory)
    merged = merge_lora(directory, ModelDirectory(adapter, adapter=True))
    save_and_print(
        merged, target, "Merging", dtype=dtype, max_shard_size=max_shard_size, like=directory, as_json=as_json
    )
