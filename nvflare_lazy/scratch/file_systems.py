# SPDX-License-Identifier: Apache-2.0
"""What kind of disk a directory is on: memory that only looks like one is of no use to a program that saves memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RootReport:
    """What a scratch root is on."""

    path: Path
    file_system: str
    memory_backed: bool
    shared: bool
    free: int
    total: int
    writable: bool

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with this place, each with what to do."""
        raise NotImplementedError


def describe_root(path: str | os.PathLike[str]) -> RootReport:
    """Say what a directory is on."""
    raise NotImplementedError
