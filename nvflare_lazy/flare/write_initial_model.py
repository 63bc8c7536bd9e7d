# SPDX-License-Identifier: Apache-2.0
"""The process that instantiates a model class on disk and copies its parameters to a file (see `initial_model`)."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import torch

from nvflare_lazy.flare.parameters_on_disk import ParametersOnDisk
from nvflare_lazy.formats.save_checkpoint import save
from nvflare_lazy.transport.malloc_tuning import tune_malloc


def main() -> None:
    """Read the order from standard input, and write the file named on the command line."""
    order = json.load(sys.stdin)
    # The server's own path, in its order: the job's `custom` folder is on it.
    sys.path[:] = order["sys_path"]
    tune_malloc(keep_buffers=False)
    path = Path(sys.argv[1])
    module, _, name = order["class_path"].rpartition(".")
    # Importing NVFlare for this would take a quarter of a second.
    with ParametersOnDisk(path.parent):
        model = getattr(import_module(module), name)(**order["args"])
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"{order['class_path']} makes a {type(model).__name__}, not a torch.nn.Module")
        weights = model.state_dict()
    save(weights, path)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the destructors of torch, which take another third of a second.
    os._exit(0)
