# SPDX-License-Identifier: Apache-2.0
"""Give back what dead owners left: a process that was killed cannot do it itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LeaseReport:
    """One job's scratch directory, and whether its owner lives."""

    path: Path
    job: str
    owner: str
    alive: bool | None  # None: owned on another host, or nothing proves it either way
    nbytes: int
    age: float
    reason: str


@dataclass(frozen=True)
class Reclaimed:
    """One directory that was given back."""

    path: Path
    job: str
    owner: str
    nbytes: int
    reason: str


def list_scratch(root: str | os.PathLike[str] | None = None) -> list[LeaseReport]:
    """List the jobs that have scratch under a root."""
    raise NotImplementedError


def reclaim(root: str | os.PathLike[str] | None = None, *, other_hosts: bool = False) -> list[Reclaimed]:
    """Remove what dead owners left under a root."""
    raise NotImplementedError
