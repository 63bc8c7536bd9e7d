# SPDX-License-Identifier: Apache-2.0
"""Scratch space: leased directories on disk for received tensors, with a quota and cleanup.

The transport writes received tensors here. Lazy tensors own the directory of their file, which is removed with the
last of them.
"""

from __future__ import annotations

from nvflare_lazy.scratch._reclaim import LeaseInfo, list_scratch, reclaim
from nvflare_lazy.scratch.directory_lease import DirectoryLease
from nvflare_lazy.scratch.download import DownloadScratch
from nvflare_lazy.scratch.file import ScratchFile
from nvflare_lazy.scratch.file_systems import RootInfo, inspect_root
from nvflare_lazy.scratch.job import JobScratch

__all__ = [
    "DirectoryLease",
    "DownloadScratch",
    "JobScratch",
    "LeaseInfo",
    "RootInfo",
    "ScratchFile",
    "inspect_root",
    "list_scratch",
    "reclaim",
]
