# SPDX-License-Identifier: Apache-2.0
"""Where scratch lives: the argument, the environment, or a per-user directory, checked before anything is put in it."""

from __future__ import annotations

import os
from pathlib import Path


class ScratchRoot:
    """The directory all scratch is under."""

    @staticmethod
    def resolve(root: str | os.PathLike[str] | None = None) -> Path:
        """Return the directory to use, made and checked."""
        raise NotImplementedError

    @staticmethod
    def locate(root: str | os.PathLike[str] | None = None) -> tuple[Path, str]:
        """Return where the root would be, and who says so, without touching the disk."""
        raise NotImplementedError
