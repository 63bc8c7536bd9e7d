# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of any size that take no room: a header, and a hole where the tensors are."""

from __future__ import annotations

import os
from pathlib import Path

from nvflare_lazy.formats.safetensors_layout import TensorMeta, lay_out


def write_sparse(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Write a safetensors file of zeros.

    Args:
        path: The file.
        tensors: dtype and shape by name.
    """
    layout = lay_out([TensorMeta(name, dtype, shape) for name, (dtype, shape) in tensors.items()], None, str(path))
    path.write_bytes(layout.start)
    os.truncate(path, layout.nbytes)
