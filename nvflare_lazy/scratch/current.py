# SPDX-License-Identifier: Apache-2.0
"""The job scratch of this process: where a decomposer, which nobody passes anything, finds it.

The job's own component puts one here that is configured; whoever comes without one gets the defaults.
"""

from __future__ import annotations

import os
import threading

from nvflare_lazy.scratch.job import JobScratch

_lock = threading.RLock()
_job: JobScratch | None = None


def current_job_scratch() -> JobScratch:
    """Return this process's job scratch; one with defaults is opened if there is none, or it was released."""
    global _job
    with _lock:
        if _job is None or _job.released:
            _job = JobScratch.open(job=f"process {os.getpid()}")
        return _job


def use_job_scratch(job: JobScratch | None) -> JobScratch | None:
    """Make this the process's job scratch; return the one before, which stays as it is.

    Example:
        >>> use_job_scratch(JobScratch.open("/data/scratch", job=job_id, quota="50GiB"))
    """
    global _job
    with _lock:
        before, _job = _job, job
        return before


def reset_job_scratch() -> None:
    """Release the process's job scratch, if there is one; the next use starts over."""
    job = use_job_scratch(None)
    if job is not None:
        job.release()


def _start_over_in_child() -> None:
    global _job, _lock
    _lock = threading.RLock()
    _job = None


os.register_at_fork(after_in_child=_start_over_in_child)
