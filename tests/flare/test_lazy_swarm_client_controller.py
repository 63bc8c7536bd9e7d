# SPDX-License-Identifier: Apache-2.0
"""The controller of clients in swarm learning: its requests on disk, and the model in a training script."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.ccwf.swarm_client_ctl import SwarmClientController

from nvflare_lazy.flare import LazySwarmClientController
from nvflare_lazy.flare.tensor_names import TensorNames
from nvflare_lazy.transport.via_downloader import LazyDownloadRef


def test_models_are_requested_as_configured(fl_ctx, monkeypatch):
    """NVFlare's method, a private one, resolves references as before; it does not get NVFlare's request for memory."""
    requests = []
    ours, stock = LazySwarmClientController._resolve_lazy_refs, SwarmClientController._resolve_lazy_refs
    assert [*inspect.signature(ours).parameters] == [*inspect.signature(stock).parameters]

    def resolve(self, payload, fl_ctx, enable_tensor_disk_offload=None):
        requests.append(enable_tensor_disk_offload)
        return payload

    monkeypatch.setattr(SwarmClientController, "_resolve_lazy_refs", resolve)
    task = DXO(DataKind.WEIGHTS, data={"w": LazyDownloadRef("site-2", "ref", "T0")}).to_shareable()
    for controller in (SwarmClientController(), LazySwarmClientController()):
        controller._prepare_learn_task_data(task, fl_ctx)
    assert requests == [False, None]
    assert LazySwarmClientController().enable_tensor_disk_offload


def test_a_script_gets_tied_tensors_under_all_their_names(fl_ctx, start):
    """In a job that started from a Hugging Face directory; clients send each other the stored names only."""
    persistor = start(model={"path": "torch.nn.Linear", "args": {"in_features": 2, "out_features": 1}})
    persistor.names = TensorNames({"head": "weight"})
    seen = []
    controller = LazySwarmClientController()
    controller.learn_executor = SimpleNamespace(
        execute=lambda name, data, *context: (seen.append({*from_shareable(data).data}), make_reply(ReturnCode.OK))[1]
    )
    task = DXO(DataKind.WEIGHTS, data={"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}).to_shareable()
    controller.execute_learn_task(task, fl_ctx, Signal())
    assert seen == [{"weight", "bias", "head"}]
