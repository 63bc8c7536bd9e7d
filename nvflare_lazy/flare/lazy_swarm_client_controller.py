# SPDX-License-Identifier: Apache-2.0
"""`LazySwarmClientController`: swarm learning in which clients receive and aggregate models on disk.

NVFlare's controller loads the global model into the memory of each client that aggregates or trains in its own process.
"""

from __future__ import annotations

from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.ccwf.swarm_client_ctl import SwarmClientController

from nvflare_lazy._text import logs_printably
from nvflare_lazy.flare import job_context
from nvflare_lazy.transport.registration import register


@logs_printably
class LazySwarmClientController(SwarmClientController):
    """Accepts all arguments that NVFlare's `SwarmClientController` accepts.

    Requires `TensorOffload`, `LazyAggregator` and `LazyModelPersistor` on the same client. Training scripts that run in
    the client's process receive lazy tensors.

    Example:
        >>> {"tasks": ["swarm_*"], "executor": {"path": "nvflare_lazy.flare.LazySwarmClientController",
        ...  "args": {"learn_task_ack_timeout": 3600, "min_responses_required": 3}}}
    """

    def __init__(self, *args: Any, enable_tensor_disk_offload: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, enable_tensor_disk_offload=enable_tensor_disk_offload, **kwargs)
        register()

    def execute_learn_task(self, data: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Train with the global model, which has tied tensors under all their names."""
        persistor = job_context.persistor_of(fl_ctx)
        if persistor is not None:
            persistor.use_client_names(data)
        return super().execute_learn_task(data, fl_ctx, abort_signal)

    def _resolve_lazy_refs(
        self, payload: Shareable, fl_ctx: FLContext, enable_tensor_disk_offload: bool | None = None
    ) -> Shareable:
        # NVFlare requests the global model in memory, and results as configured.
        del enable_tensor_disk_offload
        return super()._resolve_lazy_refs(payload, fl_ctx)
