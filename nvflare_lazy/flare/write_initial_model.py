# SPDX-License-Identifier: Apache-2.0
"""The process that instantiates a model class on disk and copies its parameters to a file (see `initial_model`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from nvflare.fuel.utils.class_utils import instantiate_class

from nvflare_lazy.flare.malloc_tuning import tune_malloc
from nvflare_lazy.flare.parameters_on_disk import ParametersOnDisk
from nvflare_lazy.formats.save_checkpoint import save


def main() -> None:
    """Read the order from standard input, and write the file named on the command line."""
    order = json.load(sys.stdin)
    # The server's own path, in its order: the job's `custom` folder is on it.
    sys.path[:] = order["sys_path"]
    # Results that move to disk leave holes that the next ones do not fit in.
    tune_malloc(forwards_only=True)
    path = Path(sys.argv[1])
    with ParametersOnDisk(path.parent):
        model = instantiate_class(order["class_path"], order["args"])
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"{order['class_path']} makes a {type(model).__name__}, not a torch.nn.Module")
        weights = model.state_dict()
    save(weights, path)


if __name__ == "__main__":
    main()
