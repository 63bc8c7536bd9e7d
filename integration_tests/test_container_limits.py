# SPDX-License-Identifier: Apache-2.0
"""Jobs in a memory cgroup: a warning at the start if the limit is lower than the demand, and none otherwise."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from benchmarks.fl_job import FLJob
from benchmarks.fl_job.memory_group import MemoryGroup
from integration_tests.conftest import JobRunner

LIMIT = 3 << 30
WARNING = "This machine may be too small for 2 results of 256.0 MiB: the memory limit of 3.0 GiB"


@pytest.mark.slow
@pytest.mark.parametrize(("memory_budget", "warns"), [("128MiB", False), ("2900MiB", True)])
def test_a_job_in_a_memory_group(run_job: JobRunner, memory_budget: str, warns: bool):
    """The server and the clients share the limit; page cache of the model does not cause a warning."""
    job = FLJob(mode="level-2", model_mib=256, offload={"memory_budget": memory_budget})
    with ExitStack() as stack:
        try:
            group = stack.enter_context(MemoryGroup(LIMIT))
        except OSError as error:
            pytest.skip(str(error))
        result = run_job(job, group=group)
        assert group.killed == 0
        print(f"{group.anonymous >> 20} MiB left, peak with page cache {group.peak >> 20} MiB")
    assert result.server_log.count(WARNING) == warns
    print([line for line in result.server_log.splitlines() if "may be too small" in line])
