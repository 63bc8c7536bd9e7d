# SPDX-License-Identifier: Apache-2.0
"""Models for tests, importable by the process that instantiates them."""

from __future__ import annotations

import os
import pathlib
import sys

import torch


class Small(torch.nn.Module):
    """Two tensors; writes to `witness`: its process id, whether NVFlare is loaded, and what waiting threads do."""

    def __init__(self, width: int = 2, witness: str | None = None, fail: bool = False) -> None:
        super().__init__()
        if witness:
            with pathlib.Path(witness).open("a") as file:
                file.write(f"{os.getpid()} {'nvflare' in sys.modules} {os.environ['OMP_WAIT_POLICY']}\n")
        if fail:
            raise ValueError("no such model today")
        self.layer = torch.nn.Linear(width, 1)
        torch.nn.init.constant_(self.layer.weight, 0.5)
        torch.nn.init.constant_(self.layer.bias, 0.25)


def not_a_model() -> dict[str, int]:
    return {}
