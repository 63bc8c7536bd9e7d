# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy export`: write the result of a job as a Hugging Face directory, which `from_pretrained` loads.

Copies a tile at a time, so the model need not fit in memory.
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
    section_option,
)

if TYPE_CHECKING:
    import torch


@click.command(
    epilog="Example: nvflare-lazy export FL_global_model.safetensors --base models/initial --out models/trained"
)
@click.argument("result", metavar="RESULT", type=click.Path())
@click.option(
    "--base",
    required=True,
    metavar="HF_DIR",
    type=HuggingFaceDirectory(),
    help="Initial Hugging Face directory of the job: a model, or a PEFT adapter.",
)
@click.option("--adapter", is_flag=True, help="RESULT is an adapter, also if HF_DIR has a config.json.")
@click.option("-o", "--out", required=True, metavar="OUT", type=click.Path(), help="Directory to write, or its URL.")
@section_option
@dtype_option
@max_shard_size_option
@click.option("--force", is_flag=True, help="Replace the model in OUT if it exists.")
@json_option
def export(
    result: str,
    base: str,
    adapter: bool,
    out: str,
    section: str | None,
    dtype: torch.dtype | None,
    max_shard_size: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the result of a job as a Hugging Face directory.

    RESULT is any checkpoint, for example FL_global_model.safetensors or FL_global_model.pt. Its tensors are matched
    by name with HF_DIR: a prefix that NVFlare's Hugging Face client added or stripped is recognized, and tied
    embeddings are stored as in HF_DIR. If a tensor is missing or unexpected, nothing is written. The configuration,
    tokenizer and similar files are copied from HF_DIR.
    """
    import nvflare_lazy
    from nvflare_lazy.formats.hugging_face import ModelDirectory
    from nvflare_lazy.formats.hugging_face.match import match_model_directory
    from nvflare_lazy.formats.open_checkpoint import open_model

    directory = ModelDirectory(base, adapter=adapter or None)
    target = resolve_output(out, "--out", force=force, like=directory)

    tensors = nvflare_lazy.open(result, section=section) if section else open_model(result)
    matched = match_model_directory(tensors, directory)
    save_and_print(
        matched, target, "Exporting", dtype=dtype, max_shard_size=max_shard_size, like=directory, as_json=as_json
    )
