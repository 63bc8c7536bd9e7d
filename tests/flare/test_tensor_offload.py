# SPDX-License-Identifier: Apache-2.0
"""The offload component: its configuration, and its start and end with a run."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nvflare.apis.client import Client
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, ProcessType, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.ccwf.swarm_client_ctl import SwarmClientController
from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_opt.tensor_stream.server import TensorServerStreamer
from nvflare.private.fed.client.client_runner import TaskRouter

import nvflare_lazy
from nvflare_lazy.flare import LazySwarmClientController, TensorOffload, job_context, results_in_memory, tensor_offload
from nvflare_lazy.flare.client_errors import ErrorRecorder
from nvflare_lazy.records import TransferRecord
from nvflare_lazy.transport import offload
from nvflare_lazy.transport.handoff.hop import Hop
from nvflare_lazy.transport.malloc_tuning import MallocTrimmer
from nvflare_lazy.transport.registration import Registration, registered
from nvflare_lazy.transport.ways import AS_ITEMS
from tests.flare.conftest import give, receive_from


@pytest.fixture(autouse=True)
def _mode_of_a_new_process():
    before = offload.runtime.use(None)
    yield
    offload.runtime.use(before)


def test_a_run_has_scratch_of_its_own_from_beginning_to_end(fl_ctx, tmp_path):
    """It is leased when the run starts, with everything that is configured, and is gone when the run ends."""
    fl_ctx.set_prop(ReservedKey.RUN_NUM, "job-7")
    component = TensorOffload(str(tmp_path / "root"), scratch_quota="3MiB", memory_budget="64MiB", handoff=False)
    component.handle_event(EventType.START_RUN, fl_ctx)
    assert not offload.runtime.handoff
    scratch = offload.runtime.scratch
    assert scratch.path.parent == tmp_path / "root"
    assert scratch._quota.limit == 3 << 20
    assert offload.runtime.budget.limit == 16 << 20
    assert offload.runtime.mode_for(None).scratch is scratch
    assert job_context.offload_of(fl_ctx) is component
    assert registered().complete
    component.handle_event(EventType.END_RUN, fl_ctx)
    assert not scratch.path.exists()
    assert offload.runtime.mode_for(None).scratch is None


def test_collections_leave_out_what_was_there_before_the_run(fl_ctx, tmp_path):
    """Garbage collections in a run do not look at the objects of the modules."""
    component = TensorOffload(str(tmp_path / "root"))
    before = gc.get_freeze_count()
    component.handle_event(EventType.START_RUN, fl_ctx)
    assert gc.get_freeze_count() > before
    component.handle_event(EventType.END_RUN, fl_ctx)
    assert gc.get_freeze_count() == 0


def test_objects_that_a_user_has_frozen_stay_frozen(fl_ctx, tmp_path):
    """The end of a run does not undo what a component or script did before it."""
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        component = TensorOffload(str(tmp_path / "root"))
        component.handle_event(EventType.START_RUN, fl_ctx)
        component.handle_event(EventType.END_RUN, fl_ctx)
        # Objects that have been deleted since do not count.
        assert gc.get_freeze_count() > frozen // 2
    finally:
        gc.unfreeze()


def test_a_script_in_the_same_process_changes_nothing(fl_ctx, tmp_path):
    """`install()` in a training script keeps the scratch, and the limit in flight, of the component."""
    component = TensorOffload(str(tmp_path / "root"), memory_budget="64MiB")
    component.handle_event(EventType.START_RUN, fl_ctx)
    scratch = offload.runtime.scratch
    assert nvflare_lazy.install().complete
    assert offload.runtime.mode_for(None).scratch is scratch
    assert offload.runtime.budget.limit == 16 << 20
    component.handle_event(EventType.END_RUN, fl_ctx)
    assert not scratch.path.exists()


@pytest.mark.parametrize("before", [None, "elsewhere"])
def test_trainers_that_a_client_starts_have_its_scratch_root(fl_ctx, tmp_path, monkeypatch, before):
    """It is in the environment before the executors handle START_RUN, and as it was when the run ends."""
    monkeypatch.delenv("NVFLARE_LAZY_SCRATCH", raising=False)
    if before:
        monkeypatch.setenv("NVFLARE_LAZY_SCRATCH", before)
    fl_ctx.set_prop(FLContextKey.PROCESS_TYPE, ProcessType.CLIENT_JOB)
    component = TensorOffload(str(tmp_path / "root"))
    component.handle_event(EventType.ABOUT_TO_START_RUN, fl_ctx)
    assert os.environ["NVFLARE_LAZY_SCRATCH"] == str(tmp_path / "root")
    component.handle_event(EventType.START_RUN, fl_ctx)
    assert [path.name for path in (tmp_path / "root").iterdir() if path.is_dir()] == [offload.runtime.scratch.path.name]
    component.handle_event(EventType.END_RUN, fl_ctx)
    assert os.environ.get("NVFLARE_LAZY_SCRATCH") == before


@pytest.mark.parametrize(
    ("process", "arguments", "warnings"),
    [
        (ProcessType.SERVER_JOB, {"params_type": "FULL", "scratch_quota": "1GiB", "handoff": False}, []),
        (ProcessType.CLIENT_JOB, {"params_type": "FULL"}, ["params_type, because this client does not aggregate"]),
        (ProcessType.SERVER_JOB, {"scratch_quota": "8000PiB"}, ["scratch_quota, because the disk has "]),
    ],
)
def test_settings_without_effect(fl_ctx, tmp_path, caplog, process, arguments, warnings):
    """They are logged when the run starts."""
    fl_ctx.set_prop(FLContextKey.PROCESS_TYPE, process)
    component = TensorOffload(str(tmp_path / "root"), **arguments)
    component.handle_event(EventType.START_RUN, fl_ctx)
    component.handle_event(EventType.END_RUN, fl_ctx)
    found = [record.getMessage() for record in caplog.records if "Setting without effect" in record.getMessage()]
    assert len(found) == len(warnings)
    assert all(map(str.startswith, found, (f"Setting without effect: {warning}" for warning in warnings)))


def test_handoff_without_effect(fl_ctx, tmp_path, caplog):
    """After a round in which all tensors were received from processes without the package, once."""
    component = TensorOffload(str(tmp_path / "root"), handoff=False)
    component.handle_event(EventType.START_RUN, fl_ctx)
    for way in ("in segments", AS_ITEMS, AS_ITEMS):
        component.handle_event(AppEventType.ROUND_STARTED, fl_ctx)
        offload.runtime.record_transfer(TransferRecord(direction="received", nbytes=1 << 20, way=way))
        component.handle_event(EventType.END_WORKFLOW, fl_ctx)
        assert caplog.text.count("Setting without effect: handoff, because no process") == (way == AS_ITEMS)
    component.handle_event(EventType.END_RUN, fl_ctx)


class _Counts:
    def requires_materialized_task_result(self, task_name):
        return True


@pytest.mark.parametrize(
    ("runner", "scope", "components", "enabled"),
    [
        ({}, {}, {"offload": FLComponent()}, True),
        ({"task_result_filters": {"train_out": [object()]}}, {}, {}, False),
        ({"task_data_filters": {"train_in": [object()]}}, {}, {}, False),
        ({}, {"task_result_filters": {"in": [], "out": [object()]}}, {}, False),
        ({}, {"task_data_filters": {"in": [], "out": []}}, {}, True),
        ({}, {}, {"counter": _Counts()}, False),
        ({"task_router": SimpleNamespace(task_table={"a": SwarmClientController()})}, {}, {}, False),
        ({"task_router": SimpleNamespace(task_table={"a": LazySwarmClientController()})}, {}, {}, True),
    ],
)
def test_client_jobs_take_tensors_that_only_pass_through(fl_ctx, engine, tmp_path, runner, scope, components, enabled):
    """Where NVFlare would request them in memory, since something there may write to them, they stay references."""
    engine.get_all_components = lambda: components
    fl_ctx.set_prop(FLContextKey.PROCESS_TYPE, ProcessType.CLIENT_JOB)
    fl_ctx.set_prop(FLContextKey.RUNNER, SimpleNamespace(**runner))
    fl_ctx.set_prop(FLContextKey.SCOPE_OBJECT, SimpleNamespace(**scope))
    component = TensorOffload(str(tmp_path / "root"))
    component.handle_event(EventType.START_RUN, fl_ctx)
    assert offload.runtime.shared(Hop).enabled == enabled
    component.handle_event(EventType.END_RUN, fl_ctx)
    assert not offload.runtime.shared(Hop).enabled


def run(component, event, fl_ctx):
    component.handle_event(event, fl_ctx)
    return offload.runtime.mode_for(None).scratch, offload.runtime.budget.limit


def test_install_survives_a_job(fl_ctx, tmp_path, monkeypatch):
    """After `install()` and a job in the same process, tensors still go to disk, within the limit from before."""
    monkeypatch.setenv("NVFLARE_LAZY_SCRATCH", str(tmp_path / "process"))
    nvflare_lazy.install()
    limit, scratch = offload.runtime.budget.limit, offload.runtime.scratch
    component = TensorOffload(str(tmp_path / "job"), memory_budget="1GiB")
    during, _ = run(component, EventType.START_RUN, fl_ctx)
    assert during is not scratch
    assert offload.runtime.budget.limit == 256 << 20
    assert run(component, EventType.END_RUN, fl_ctx) == (scratch, limit)


def test_jobs_restore_what_they_found(fl_ctx, tmp_path):
    """A job within a job restores the outer mode; the outer one restores the default: to ask NVFlare."""
    before = run(TensorOffload(), EventType.END_WORKFLOW, fl_ctx)
    outer, inner = (TensorOffload(str(tmp_path / name), memory_budget=f"{n}MiB") for n, name in ((64, "a"), (32, "b")))
    outside = run(outer, EventType.START_RUN, fl_ctx)
    inside = run(inner, EventType.START_RUN, fl_ctx)
    assert inside[0] is not outside[0]
    assert (outside[1], inside[1]) == (16 << 20, 8 << 20)
    assert run(inner, EventType.END_RUN, fl_ctx) == outside
    assert run(inner, EventType.END_RUN, fl_ctx) == outside  # ends once
    assert run(outer, EventType.END_RUN, fl_ctx) == before == (None, 32 << 20)


def test_without_scratch_there_is_no_job(fl_ctx, engine, tmp_path):
    """The job ends before any training, and the error describes the invalid directory."""
    (tmp_path / "file").write_text("")
    TensorOffload(str(tmp_path / "file")).handle_event(EventType.START_RUN, fl_ctx)
    (reason,) = engine.panics
    assert "cannot create scratch for tensors" in reason
    assert str(tmp_path / "file") in reason


def send_task(component, fl_ctx, task, tensors, meta=None, process=ProcessType.SERVER_JOB):
    """Tell the component that a task was sent; return the limits of results after it."""
    peer = FLContext()
    peer.set_prop(ReservedKey.IDENTITY_NAME, "site-1", private=False)
    fl_ctx.set_peer_context(peer)
    fl_ctx.set_prop(FLContextKey.PROCESS_TYPE, process)
    fl_ctx.set_prop(FLContextKey.TASK_NAME, task)
    data = DXO(DataKind.WEIGHTS, data=tensors, meta=meta or {}).to_shareable() if tensors else Shareable()
    fl_ctx.set_prop(FLContextKey.TASK_DATA, data)
    component.handle_event(EventType.AFTER_TASK_DATA_FILTER, fl_ctx)
    return offload.runtime.limits


def test_results_are_limited_by_the_model(fl_ctx, tmp_path):
    """Twice the largest task or the global model, with state; none on a client, and none before a model is known."""
    mib = 1 << 20
    component = TensorOffload(str(tmp_path / "root"))
    component.handle_event(EventType.START_RUN, fl_ctx)
    assert send_task(component, fl_ctx, "get_weights", {}).nbytes is None
    model = {"w": torch.empty(40 * mib, dtype=torch.uint8)}
    assert send_task(component, fl_ctx, "train", model, process=ProcessType.CLIENT_JOB).nbytes is None
    assert send_task(component, fl_ctx, "train", model).nbytes == 80 * mib
    controls = {"controls": {"w": torch.empty(50 * mib, dtype=torch.uint8)}}
    assert send_task(component, fl_ctx, "train again", model, controls).nbytes == 180 * mib
    give(fl_ctx, w=torch.empty(200 * mib, dtype=torch.uint8))
    limits = send_task(component, fl_ctx, "submit_model", {})
    assert (limits.nbytes, limits.tensors) == (400 * mib, 1004)
    assert send_task(component, fl_ctx, "validate", model) is limits
    component.handle_event(EventType.END_RUN, fl_ctx)
    assert offload.runtime.limits.nbytes is None


def test_a_configured_limit_of_results(fl_ctx, tmp_path):
    """It holds from the beginning, and whatever the model is."""
    component = TensorOffload(str(tmp_path / "root"), max_result_size="3MiB")
    component.handle_event(EventType.START_RUN, fl_ctx)
    assert offload.runtime.limits.nbytes == 3 << 20
    assert send_task(component, fl_ctx, "train", {"w": torch.zeros(1 << 20)}).nbytes == 3 << 20
    component.handle_event(EventType.END_RUN, fl_ctx)


@pytest.mark.parametrize(
    "arguments", [{"scratch_quota": "much"}, {"memory_budget": "some"}, {"max_result_size": "plenty"}]
)
def test_what_is_wrong_in_a_configuration_is_said_at_once(arguments):
    """By the constructor, with the invalid text."""
    with pytest.raises(ValueError, match=next(iter(arguments.values()))):
        TensorOffload(**arguments)


@pytest.mark.parametrize(
    ("modes", "room"),
    [
        (["external_process"], 32),
        (["external_process", "attach"], 32),
        (["external_process", None], 96),
        (["external_process", "swarm"], 96),
        (["in_process", "swarm"], 96),
        ([], 96),
    ],
)
def test_free_memory_that_a_process_keeps(fl_ctx, tmp_path, monkeypatch, modes, room):
    """A client job that only forwards to external trainers keeps less free memory than other jobs."""
    router = TaskRouter()
    for number, mode in enumerate(modes):
        command = {"command": "python train.py"} if mode == "external_process" else {}
        script = {"task_script_path": "train.py"} if mode == "in_process" else {}
        if mode is None:
            executor = FLComponent()
        elif mode == "swarm":
            executor = SwarmClientController()
        else:
            executor = ClientAPIExecutor(mode, attach_id=_attach(mode), **command, **script)
        router.add_executor([f"task{number}"], executor)
    fl_ctx.set_prop(FLContextKey.RUNNER, SimpleNamespace(task_router=router))
    component = TensorOffload(str(tmp_path / "root"))
    kept = []
    monkeypatch.setattr(tensor_offload, "MallocTrimmer", lambda room: kept.append(room) or MallocTrimmer(room))
    component.handle_event(EventType.START_RUN, fl_ctx)
    component.handle_event(EventType.END_RUN, fl_ctx)
    assert kept == [room << 20]


def test_what_came_is_all_that_came(fl_ctx, tmp_path, caplog):
    """Tensors outside the model, such as control variates of SCAFFOLD, count as received."""
    caplog.set_level("INFO")
    component = TensorOffload(str(tmp_path / "root"))
    component.handle_event(EventType.START_RUN, fl_ctx)
    component.handle_event(AppEventType.ROUND_STARTED, fl_ctx)
    meta = {"controls": {"w": torch.zeros(256), "b": torch.zeros(256)}, "steps": 7}
    receive_from(fl_ctx, "site-1", DXO(DataKind.WEIGHTS, data={"w": torch.zeros(256)}, meta=meta).to_shareable())
    component.handle_event(EventType.BEFORE_TASK_RESULT_FILTER, fl_ctx)
    component.handle_event(AppEventType.AFTER_CONTRIBUTION_ACCEPT, fl_ctx)
    component.handle_event(EventType.END_RUN, fl_ctx)
    assert "Round 0: received the result of site-1: 3.0 KiB in 3 tensors, in memory" in caplog.text


def test_a_controller_that_announces_no_rounds(fl_ctx, tmp_path, caplog):
    """A round starts with its first task and ends with the model; without verdicts, it still has results."""
    caplog.set_level("INFO")
    component = TensorOffload(str(tmp_path / "root"))
    component.handle_event(EventType.START_RUN, fl_ctx)
    for number in range(3):
        task = Shareable()
        task.set_header(AppConstants.CURRENT_ROUND, number)
        fl_ctx.set_prop(FLContextKey.TASK_DATA, task)
        receive_from(fl_ctx, "site-1", DXO(DataKind.WEIGHTS, data={"w": torch.zeros(256)}).to_shareable())
        component.handle_event(EventType.AFTER_TASK_DATA_FILTER, fl_ctx)
        component.handle_event(EventType.BEFORE_TASK_RESULT_FILTER, fl_ctx)
        if number != 1:
            fl_ctx.set_prop(AppConstants.AGGREGATION_ACCEPTED, True)
            component.handle_event(AppEventType.AFTER_CONTRIBUTION_ACCEPT, fl_ctx)
    component.handle_event(AppEventType.AFTER_LEARNABLE_PERSIST, fl_ctx)
    # A task that comes after the last round, such as one of an evaluation.
    component.handle_event(EventType.AFTER_TASK_DATA_FILTER, fl_ctx)
    component.handle_event(EventType.END_RUN, fl_ctx)
    assert re.findall(r"Round (\d) finished in [\d.]+ s: (.*); memory", caplog.text) == [
        ("0", "aggregated 1 of 1 results, received 1.0 KiB"),
        ("1", "received 1 results, 1.0 KiB"),
        ("2", "aggregated 1 of 1 results, received 1.0 KiB"),
    ]
    assert re.findall(r"Round (\d): received the result of site-1 after", caplog.text) == ["0", "1", "2"]


@pytest.mark.parametrize(("task", "code"), [("train", ReturnCode.OK), ("submit_model", "EXECUTION_RESULT_ERROR")])
def test_a_result_that_cannot_be_used_comes_without_tensors(fl_ctx, tmp_path, task, code):
    """Controllers skip an empty result of training; cross-site evaluation would continue with an empty model."""
    give(fl_ctx, w=torch.zeros(3))
    result = DXO(DataKind.WEIGHTS, data={"w": torch.zeros(5)}).to_shareable()
    receive_from(fl_ctx, "site-1", result)
    fl_ctx.set_prop(FLContextKey.TASK_NAME, task)
    TensorOffload().handle_event(EventType.AFTER_TASK_RESULT_FILTER, fl_ctx)
    assert from_shareable(result).data == {}
    assert result.get_return_code() == code


def test_a_global_model_of_settings_is_no_reference(fl_ctx, tmp_path):
    """NVFlare's recipes for scikit-learn start by sending the settings of the classifier, and get its tensors back."""
    fl_ctx.set_prop(AppConstants.GLOBAL_MODEL, make_model_learnable({"n_classes": 2, "penalty": "l2"}, {}))
    fl_ctx.set_prop(FLContextKey.RUNNER, SimpleNamespace(current_wf=SimpleNamespace(controller=FedAvg(num_clients=1))))
    result = DXO(DataKind.WEIGHTS, data={"coef": np.zeros(3)}).to_shareable()
    receive_from(fl_ctx, "site-1", result)
    TensorOffload().handle_event(EventType.AFTER_TASK_RESULT_FILTER, fl_ctx)
    assert from_shareable(result).data.keys() == {"coef"}


def test_encrypted_results_reach_their_aggregator(fl_ctx):
    """Their values are objects of another library; only a job with NVFlare's aggregator for them lets them pass."""
    give(fl_ctx, w=torch.zeros(3))
    aggregator = type("HEAggregator", (), {"__module__": "nvflare.app_opt.he.intime_accumulate_model_aggregator"})
    for kind, passes in ((aggregator, True), (type("Other", (), {}), False)):
        workflow = SimpleNamespace(controller=SimpleNamespace(aggregator=kind()))
        fl_ctx.set_prop(FLContextKey.RUNNER, SimpleNamespace(current_wf=workflow))
        dxo = DXO(DataKind.WEIGHTS, data={"w": object()}, meta={MetaKey.PROCESSED_ALGORITHM: "CKKS"})
        result = dxo.to_shareable()
        receive_from(fl_ctx, "site-1", result)
        TensorOffload().handle_event(EventType.AFTER_TASK_RESULT_FILTER, fl_ctx)
        assert bool(from_shareable(result).data) is passes


def test_a_client_that_claims_the_name_of_another_one(fl_ctx, tmp_path, caplog):
    """The log has the client whose token NVFlare has verified."""
    caplog.set_level("INFO")
    component = TensorOffload(str(tmp_path / "root"))
    component.handle_event(EventType.START_RUN, fl_ctx)
    give(fl_ctx, w=torch.zeros(3))
    result = DXO(DataKind.WEIGHTS, data={"w": torch.zeros(5)}).to_shareable()
    receive_from(fl_ctx, "site-1", result, claimed="site-2")
    component.handle_event(EventType.AFTER_TASK_RESULT_FILTER, fl_ctx)
    component.handle_event(EventType.END_RUN, fl_ctx)
    assert "Rejected the result of site-1" in caplog.text
    assert "of site-2" not in caplog.text


def test_a_failed_task_with_a_forged_return_code(fl_ctx, tmp_path, caplog):
    """The record of the round has it quoted, if the controller reports the result or not; NVFlare gets a known one."""
    caplog.set_level("INFO")
    component = TensorOffload(str(tmp_path / "root"))
    component.handle_event(EventType.START_RUN, fl_ctx)
    component.handle_event(AppEventType.ROUND_STARTED, fl_ctx)
    result = make_reply("OK\nFORGED\x1b[2J")
    receive_from(fl_ctx, "site-1", result)
    component.handle_event(EventType.BEFORE_TASK_RESULT_FILTER, fl_ctx)
    component.handle_event(EventType.END_RUN, fl_ctx)
    assert (
        r"skipped: site-1 (its task ended with 'OK\nFORGED\x1b[2J'; see None/log.txt in its workspace)"
        in caplog.messages[-1]
    )
    assert result.get_return_code() == ReturnCode.EXECUTION_EXCEPTION


def judge(component, fl_ctx, result, accepted):
    """Let a controller on the server judge a result of site-1."""
    receive_from(fl_ctx, "site-1", result)
    component.handle_event(EventType.BEFORE_TASK_RESULT_FILTER, fl_ctx)
    fl_ctx.set_prop(AppConstants.AGGREGATION_ACCEPTED, accepted)
    component.handle_event(AppEventType.AFTER_CONTRIBUTION_ACCEPT, fl_ctx)


def test_an_evaluation_has_no_record(fl_ctx, tmp_path, caplog):
    """Neither alone nor within a round, whose model is reported once; a metric that is a tensor changes nothing."""
    caplog.set_level("INFO")
    component = TensorOffload(str(tmp_path / "root"))
    component.handle_event(EventType.START_RUN, fl_ctx)
    metrics = DXO(DataKind.METRICS, data={"accuracy": torch.tensor(0.5)}).to_shareable()
    judge(component, fl_ctx, metrics, accepted=True)
    component.handle_event(AppEventType.ROUND_STARTED, fl_ctx)
    judge(component, fl_ctx, metrics, accepted=True)
    component.handle_event(EventType.END_WORKFLOW, fl_ctx)
    assert "Round" not in caplog.text
    component.handle_event(AppEventType.ROUND_STARTED, fl_ctx)
    judge(component, fl_ctx, DXO(DataKind.WEIGHTS, data={"w": torch.zeros(256)}).to_shareable(), accepted=True)
    judge(component, fl_ctx, metrics, accepted=True)
    component.handle_event(EventType.END_RUN, fl_ctx)
    assert caplog.text.count("received the result of site-1") == 1
    assert "aggregated 1 of 1 results, received 1.0 KiB" in caplog.messages[-1]


def test_an_aborted_task_has_no_size(fl_ctx, tmp_path, caplog):
    """There is a reason instead of bytes; without a round, the line begins without its number."""
    caplog.set_level("INFO")
    component = TensorOffload(str(tmp_path / "root"))
    component.handle_event(EventType.START_RUN, fl_ctx)
    component.handle_event(AppEventType.ROUND_STARTED, fl_ctx)
    judge(component, fl_ctx, make_reply(ReturnCode.TASK_ABORTED), accepted=False)
    assert caplog.messages[-1] == (
        "Round 0: the result of site-1 is not used: its task ended with 'TASK_ABORTED'; see None/log.txt in its "
        "workspace"
    )
    component.handle_event(EventType.END_WORKFLOW, fl_ctx)
    assert caplog.messages[-1].endswith(
        "skipped: site-1 (its task ended with 'TASK_ABORTED'; see None/log.txt in its workspace)"
    )
    judge(component, fl_ctx, DXO(DataKind.WEIGHTS, data={"w": torch.zeros(256)}).to_shareable(), accepted=True)
    assert caplog.messages[-1].startswith("Received the result of site-1: 1.0 KiB in 1 tensors, in memory; memory ")
    component.handle_event(EventType.END_RUN, fl_ctx)


@pytest.mark.parametrize("allowed", [True, False])
def test_a_site_that_does_not_send_its_log(fl_ctx, tmp_path, allowed):
    """A setting in its `resources.json` forbids it, and then no error of its clients is recorded or sent."""
    for name in ("startup", "local"):
        (tmp_path / name).mkdir()
    (tmp_path / "local" / "resources.json").write_text(json.dumps({"allow_log_streaming": allowed}))
    fl_ctx.set_prop(FLContextKey.WORKSPACE_ROOT, str(tmp_path))
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, "site-1")
    fl_ctx.set_prop(FLContextKey.PROCESS_TYPE, ProcessType.CLIENT_JOB)
    component = TensorOffload(str(tmp_path / "root"))
    component.handle_event(EventType.ABOUT_TO_START_RUN, fl_ctx)
    component.handle_event(EventType.START_RUN, fl_ctx)
    recorders = [handler for handler in logging.getLogger().handlers if isinstance(handler, ErrorRecorder)]
    component.handle_event(EventType.END_RUN, fl_ctx)
    assert len(recorders) == allowed
    assert not set(recorders) & set(logging.getLogger().handlers)


def test_a_component_ends_the_job(fl_ctx, engine, tmp_path, caplog):
    """The log has the outcome of each client once, and the round counts as failed."""
    caplog.set_level("INFO")
    engine.get_clients = lambda: [Client(name, "token") for name in ("site-1", "site-2")]
    component = TensorOffload(str(tmp_path / "root"))
    component.handle_event(EventType.START_RUN, fl_ctx)
    component.handle_event(AppEventType.ROUND_STARTED, fl_ctx)
    judge(component, fl_ctx, make_reply(ReturnCode.TASK_ABORTED), accepted=False)
    for _ in range(2):
        component.handle_event(EventType.FATAL_SYSTEM_ERROR, fl_ctx)
    component.handle_event(EventType.END_RUN, fl_ctx)
    (line,) = [line for line in caplog.messages if "ended without a new model" in line]
    assert "Round 0 ended without a new model: site-1 (its task ended with 'TASK_ABORTED'" in line
    assert line.endswith("; site-2 (had no task in this round)")
    assert "Round 0 failed after" in caplog.text


@pytest.mark.parametrize("kind", ["adaquant", "encrypted"])
def test_results_that_filters_have_changed(fl_ctx, tmp_path, caplog, kind):
    """A filter that quantizes sends the bytes in the metadata, below the names; other objects are not tensors."""
    caplog.set_level("INFO")
    component = TensorOffload(str(tmp_path / "root"))
    component.handle_event(EventType.START_RUN, fl_ctx)
    component.handle_event(AppEventType.ROUND_STARTED, fl_ctx)
    quantized = {"quant_state": {"w": {"compressed_tensor": np.zeros(300, np.uint8), "norm": 1.0}}}
    dxo = (
        DXO(DataKind.WEIGHTS, data={"w": torch.zeros(1, dtype=torch.bool)}, meta=quantized)
        if kind == "adaquant"
        else DXO(DataKind.WEIGHTS, data={"w": object()})
    )
    judge(component, fl_ctx, dxo.to_shareable(), accepted=True)
    size = "301 B in 2 tensors, in memory" if kind == "adaquant" else "no tensors"
    assert f"Round 0: received the result of site-1: {size}; memory" in caplog.messages[-1]
    component.handle_event(EventType.END_RUN, fl_ctx)


@pytest.mark.parametrize("way", ["encryption", "streaming", "swarm", "handlers", "messages"])
def test_results_in_memory_are_reported_once(fl_ctx, tmp_path, caplog, monkeypatch, way):
    """One warning for each job names what brings results past this package, and what to do."""
    processed = {MetaKey.PROCESSED_ALGORITHM: "CKKS"} if way == "encryption" else {}
    result = DXO(DataKind.WEIGHTS, data={"w": object() if processed else torch.zeros(3)}, meta=processed)
    router = TaskRouter()
    router.add_executor(["swarm_*"], SwarmClientController())
    config = SimpleNamespace(components={"streamer": TensorServerStreamer()} if way == "streaming" else {})
    fl_ctx.set_prop(FLContextKey.RUNNER, SimpleNamespace(config=config, task_router=router))
    if way == "handlers":
        found = replace(registered().handlers[0], in_place="other.Decomposer", ours=False)
        monkeypatch.setattr(results_in_memory, "registered", lambda: Registration((found,)))
    component = TensorOffload(str(tmp_path / "root"))
    component.handle_event(EventType.START_RUN, fl_ctx)
    component.handle_event(AppEventType.ROUND_STARTED, fl_ctx)
    for client in ("site-1", "site-2"):
        if way == "swarm":
            fl_ctx.set_prop(FLContextKey.PROCESS_TYPE, ProcessType.CLIENT_JOB)
        receive_from(fl_ctx, client, result.to_shareable())
        fl_ctx.set_prop(AppConstants.TRAINING_RESULT, result.to_shareable())
        for event in (
            AppEventType.BEFORE_CONTRIBUTION_ACCEPT,
            EventType.BEFORE_TASK_RESULT_FILTER,
            EventType.AFTER_TASK_RESULT_FILTER,
        ):
            component.handle_event(event, fl_ctx)
    component.handle_event(EventType.END_RUN, fl_ctx)
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.partition("Results are in memory, not on disk: ")[2].startswith(
        {
            "encryption": "they are encrypted or processed ('CKKS')",
            "streaming": "NVFlare's tensor streaming transfers them; remove enable_tensor_streaming()",
            "swarm": "SwarmClientController requests them in memory; set its enable_tensor_disk_offload",
            "handlers": "other handlers replaced those of nvflare-lazy (torch.Tensor by other.Decomposer)",
            "messages": "the clients send them within their messages",
        }[way]
    )


def test_a_client_that_aggregates_in_swarm_learning(fl_ctx, tmp_path, caplog):
    """It has the contributors by name, checks their results, and says nothing of rounds that others aggregate."""
    caplog.set_level("INFO")
    fl_ctx.set_prop(FLContextKey.PROCESS_TYPE, ProcessType.CLIENT_JOB)
    controller = SwarmClientController()
    controller.trainers = ["site-1", "site-2", "site-3"]
    router = TaskRouter()
    router.add_executor(["swarm_*"], controller)
    fl_ctx.set_prop(FLContextKey.RUNNER, SimpleNamespace(task_router=router))
    component = TensorOffload(str(tmp_path / "root"))
    component.handle_event(EventType.START_RUN, fl_ctx)
    said = len(caplog.messages)
    # A round that another client aggregates: tasks from the server and from clients, and this client's own result.
    give(fl_ctx, w=torch.zeros(40 << 18))
    component.handle_event(AppEventType.ROUND_STARTED, fl_ctx)
    assert offload.runtime.limits.nbytes == 80 << 20
    for sender in ("simulator_server", "site-3"):
        receive_from(fl_ctx, sender, DXO(DataKind.WEIGHTS, data={"w": torch.zeros(3)}).to_shareable())
        fl_ctx.set_prop(FLContextKey.TASK_DATA, fl_ctx.get_prop(FLContextKey.TASK_RESULT))
        for event in (
            EventType.AFTER_TASK_DATA_FILTER,
            EventType.BEFORE_TASK_RESULT_FILTER,
            EventType.AFTER_TASK_RESULT_FILTER,
        ):
            component.handle_event(event, fl_ctx)
    fl_ctx.set_prop(AppConstants.CURRENT_ROUND, 1)
    give(fl_ctx, w=torch.zeros(256))
    trained = fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)["model_weights"] = {"w": torch.zeros(256)}
    component.handle_event(AppEventType.ROUND_STARTED, fl_ctx)
    trained.clear()  # by the script
    assert caplog.messages[said:] == []
    for sender, elements in (("site-1", 256), ("site-2", 5)):
        result = DXO(DataKind.WEIGHTS, data={"w": torch.zeros(elements)}).to_shareable()
        receive_from(fl_ctx, sender, Shareable())
        fl_ctx.set_prop(AppConstants.TRAINING_RESULT, result)
        component.handle_event(AppEventType.BEFORE_CONTRIBUTION_ACCEPT, fl_ctx)
        # NVFlare's aggregators accept an empty result.
        fl_ctx.set_prop(AppConstants.AGGREGATION_ACCEPTED, True)
        component.handle_event(AppEventType.AFTER_CONTRIBUTION_ACCEPT, fl_ctx)
    component.handle_event(AppEventType.AFTER_AGGREGATION, fl_ctx)
    component.handle_event(EventType.END_RUN, fl_ctx)
    lines = [line for line in caplog.messages[said:] if line.startswith("Round")]
    assert [line.partition(" after ")[0] for line in lines[:2]] == [
        f"Round 1: received the result of site-{site}" for site in (1, 2)
    ]
    assert "not used: the result of site-2 cannot be used: 'w' has shape [5]" in lines[1]
    assert "Round 1 finished in" in lines[2]
    assert "aggregated 1 of 3 results" in lines[2]
    assert "site-3 (no result received; see None/log.txt in its workspace)" in lines[2]
    assert len(lines) == 3


def _attach(mode):
    return "0123456789abcdef0123456789abcdef" if mode == "attach" else None
