# SPDX-License-Identifier: Apache-2.0
"""The offload component by itself: what it is configured with, and how it begins and ends with a run."""

from __future__ import annotations

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReservedKey

from nvflare_lazy.flare import TensorOffload, job_context
from nvflare_lazy.scratch import current_job_scratch
from nvflare_lazy.transport import offload
from nvflare_lazy.transport.budget import BUDGET
from nvflare_lazy.transport.registration import installed


@pytest.fixture(autouse=True)
def _budget_as_before():
    before = BUDGET.limit
    yield
    BUDGET.resize(before)
    offload.reset()


def test_a_run_has_scratch_of_its_own_from_beginning_to_end(fl_ctx, tmp_path):
    """It is leased when the run starts, with everything that is configured, and is gone when the run ends."""
    fl_ctx.set_prop(ReservedKey.RUN_NUM, "job-7")
    component = TensorOffload(str(tmp_path / "root"), quota="3MiB", memory_budget="64MiB")
    component.handle_event(EventType.START_RUN, fl_ctx)
    scratch = current_job_scratch()
    assert scratch.path.parent == tmp_path / "root"
    assert scratch.quota == 3 << 20
    assert BUDGET.limit == 16 << 20
    assert offload.destination(None) is scratch
    assert job_context.offload_of(fl_ctx) is component
    assert installed().complete
    component.handle_event(EventType.END_RUN, fl_ctx)
    assert not scratch.path.exists()
    assert offload.destination(None) is None


def test_without_scratch_there_is_no_job(fl_ctx, engine, tmp_path):
    """The job ends before anybody trains, and says what is wrong with the place."""
    (tmp_path / "file").write_text("")
    TensorOffload(str(tmp_path / "file")).handle_event(EventType.START_RUN, fl_ctx)
    (reason,) = engine.panics
    assert "no scratch for tensors" in reason
    assert str(tmp_path / "file") in reason


@pytest.mark.parametrize("arguments", [{"quota": "much"}, {"memory_budget": "some"}])
def test_what_is_wrong_in_a_configuration_is_said_at_once(arguments):
    """By the constructor, with the text that is no size."""
    with pytest.raises(ValueError, match=next(iter(arguments.values()))):
        TensorOffload(**arguments)
