# SPDX-License-Identifier: Apache-2.0
"""The process that instantiates a model class and streams its parameters to a file (see `initial_model`)."""

from __future__ import annotations

import json
import sys

import torch
from nvflare.fuel.utils.class_utils import instantiate_class

from nvflare_lazy.formats.save_checkpoint import save


def main() -> None:
    """Read the order from standard input, and write the file named on the command line."""
    order = json.load(sys.stdin)
    # The server's own path, in its order: the job's `custom` folder is on it.
    sys.path[:] = order["sys_path"]
    model = instantiate_class(order["class_path"], order["args"])
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{order['class_path']} makes a {type(model).__name__}, not a torch.nn.Module")
    save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
