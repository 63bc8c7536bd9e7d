# SPDX-License-Identifier: Apache-2.0
"""The job scratch of this process: where a decomposer, which nobody passes anything, finds it."""

from __future__ import annotations

from nvflare_lazy.scratch.job import JobScratch


def current_job_scratch() -> JobScratch:
    """Return this process's job scratch; one with defaults is opened when there is none."""
    raise NotImplementedError


def use_job_scratch(job: JobScratch | None) -> JobScratch | None:
    """Make this the process's job scratch; return the one before."""
    raise NotImplementedError


def reset_job_scratch() -> None:
    """Release the process's job scratch, and start over."""
    raise NotImplementedError
