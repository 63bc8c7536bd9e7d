# SPDX-License-Identifier: Apache-2.0
"""The job scratch of this process, where decomposers find it: NVFlare passes them no arguments.

The job's component sets a configured one. Without it, the first use opens one with defaults.
"""

from __future__ import annotations

import os
import threading

from nvflare_lazy.scratch.job import JobScratch

_lock = threading.RLock()
_job: JobScratch | None = None


def current_job_scratch() -> JobScratch:
    """Return the job scratch of this process; open one with defaults if there is none, or it was released."""
    global _job
    with _lock:
        if _job is None or _job.released:
            _job = JobScratch.open(job=f"process {os.getpid()}")
        return _job


def swap_job_scratch(job: JobScratch | None) -> JobScratch | None:
    """Set the job scratch of this process; return the one before, which is not released.

    Example:
        >>> swap_job_scratch(JobScratch.open("/data/scratch", job=job_id, quota="50GiB"))
    """
    global _job
    with _lock:
        before, _job = _job, job
        return before


def reset_job_scratch() -> None:
    """Release the job scratch of this process, if there is one; the next use opens another one."""
    job = swap_job_scratch(None)
    if job is not None:
        job.release()


def _start_over_in_child() -> None:
    global _job, _lock
    _lock = threading.RLock()
    _job = None


os.register_at_fork(after_in_child=_start_over_in_child)
