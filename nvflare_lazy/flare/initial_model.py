# SPDX-License-Identifier: Apache-2.0
"""The initial model of a job: a checkpoint of any readable kind, or a class that another process instantiates.

A model class makes all of its parameters in memory at once. To keep them out of the server's memory, a separate
process instantiates it, streams the parameters to a file and ends; the server opens the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nvflare_lazy._text import get_logger, quoted
from nvflare_lazy.errors import InitialModelError, NVFlareLazyError
from nvflare_lazy.flare.model_output import ModelOutput
from nvflare_lazy.formats import open_safetensors
from nvflare_lazy.formats.hugging_face import ModelDirectory
from nvflare_lazy.formats.hugging_face.tied import tied_names
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.formats.open_checkpoint import open_model
from nvflare_lazy.formats.save_checkpoint import save
from nvflare_lazy.remote.url import display

logger = get_logger(__name__)

_STDERR_TAIL = 4000
# OpenMP's threads sleep between two operators instead of spinning for milliseconds. With a write to disk after each
# operator, spinning took a third of the processor time of the process.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}


def from_checkpoint(path: Path | str) -> LazyTensorDict:
    """Open a checkpoint: safetensors, sharded, PyTorch, including files from NVFlare's persistor, or Hugging Face's.

    Of tied tensors in a Hugging Face directory, one remains.

    Raises:
        InitialModelError: The file is missing or is not a model.
    """
    try:
        directory = ModelDirectory.find(path)
        if directory is not None:
            tensors = directory.open()
            tied = {} if directory.is_adapter else tied_names(directory.config(), tensors.entries)
            kept = {name: entry for name, entry in tensors.entries.items() if name not in tied}
            return LazyTensorDict.from_entries(kept, metadata=tensors.metadata)
        return open_model(path)
    except (OSError, NVFlareLazyError) as error:
        raise InitialModelError(
            f"cannot open the initial checkpoint {display(str(path))}: {error}. "
            "source_ckpt_file_full_name must be a checkpoint that the server can read, by path or URL"
        ) from error


def from_class(class_path: str, args: Mapping[str, Any], directory: Path) -> LazyTensorDict:
    """Instantiate a model class in another process, and open the file that it writes to a directory.

    The file is removed with the last tensor of it. The constructor's arguments must be valid JSON.

    Raises:
        InitialModelError: If the class cannot be imported or instantiated; the message has the error of the process.
    """
    try:
        order = json.dumps({"class_path": class_path, "args": dict(args), "sys_path": sys.path})
    except TypeError as error:
        raise InitialModelError(
            f"the arguments of the model class {class_path} cannot be written as JSON ({error}); save a checkpoint of "
            "the model and name it as source_ckpt_file_full_name"
        ) from None
    output = ModelOutput.within(directory)
    command = [sys.executable, "-m", "nvflare_lazy.flare.write_initial_model", str(output.path)]
    made = subprocess.run(  # noqa: S603  # our own module, and a class the job's configuration names anyway
        command,
        input=order,
        capture_output=True,
        text=True,
        env={**_ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=False,
    )
    if made.returncode:
        errors = made.stderr.strip() or f"the process ended with {made.returncode}"
        logger.error("The model class %s could not be instantiated: %s", class_path, errors[-_STDERR_TAIL:])
        raise InitialModelError(
            f"the model class {class_path} could not be instantiated with {quoted(dict(args))}: "
            f"{errors.splitlines()[-1]}; the log has the output of the process"
        )
    return output.finish(open_safetensors(output.path))


def from_module(module: torch.nn.Module, directory: Path) -> LazyTensorDict:
    """Stream an instantiated model to a file, open it, and free the module's memory for good.

    NVFlare's configuration builds a model that is written as a component itself, and keeps a reference to it: so its
    parameters are taken out of it.
    """
    output = ModelOutput.within(directory)
    save(module.state_dict(), output.path)
    with torch.no_grad():
        module.to(device="meta")
    return output.finish(open_safetensors(output.path))
