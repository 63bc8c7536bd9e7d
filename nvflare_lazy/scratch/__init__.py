# SPDX-License-Identifier: Apache-2.0
"""The disk a run may use: leased directories for what is received, a quota, and nothing left behind.

Stands between the transport, which writes received tensors here, and the lazy tensors that keep their directory alive
for as long as somebody may still read them.
"""

from __future__ import annotations

from nvflare_lazy.scratch._reclaim import LeaseReport, Reclaimed, list_scratch, reclaim
from nvflare_lazy.scratch.current import current_job_scratch, reset_job_scratch, use_job_scratch
from nvflare_lazy.scratch.download import DownloadScratch
from nvflare_lazy.scratch.file import ScratchFile
from nvflare_lazy.scratch.file_systems import RootReport, describe_root
from nvflare_lazy.scratch.job import JobScratch
from nvflare_lazy.scratch.root import ScratchRoot

__all__ = [
    "DownloadScratch",
    "JobScratch",
    "LeaseReport",
    "Reclaimed",
    "RootReport",
    "ScratchFile",
    "ScratchRoot",
    "current_job_scratch",
    "describe_root",
    "list_scratch",
    "reclaim",
    "reset_job_scratch",
    "use_job_scratch",
]
