# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of any size that use no disk space: a header, and a hole instead of the tensors."""

from __future__ import annotations

import os
from pathlib import Path

from nvflare_lazy.formats.safetensors.header import encode_header, end_of


def write_sparse(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Write a safetensors file of zeros.

    Args:
        path: The file.
        tensors: dtype and shape by name.
    """
    listed = ((name, *described) for name, described in tensors.items())
    header, contents = encode_header(listed, {"format": "pt"}, where=str(path))
    path.write_bytes(header)
    os.truncate(path, end_of(contents, len(header)))
