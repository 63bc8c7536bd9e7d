# SPDX-License-Identifier: Apache-2.0
"""The cause of results that are in memory although `TensorOffload` receives on disk; a job logs it one time.

NVFlare has ways to transfer a result that no decomposer of this package takes part in.
"""

from __future__ import annotations

from typing import Any

from nvflare.apis.dxo import DXO, MetaKey
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.ccwf.swarm_client_ctl import SwarmClientController
from nvflare.app_opt.tensor_stream.server import TensorServerStreamer

from nvflare_lazy.flare import job_context
from nvflare_lazy.flare.accepted_result import described
from nvflare_lazy.transport.registration import registered


def uses_tensor_streaming(fl_ctx: FLContext) -> bool:
    """Return whether this is a server that receives results through NVFlare's tensor streaming."""
    config: Any = getattr(fl_ctx.get_prop(FLContextKey.RUNNER), "config", None)
    components = getattr(config, "components", None) or {}
    return any(isinstance(component, TensorServerStreamer) for component in components.values())


def is_encrypted(result: DXO) -> bool:
    """Return whether a result was encrypted, or processed in another way that another aggregation must know."""
    return result.meta.get(MetaKey.PROCESSED_ALGORITHM) is not None


def cause(result: DXO, fl_ctx: FLContext) -> str:
    """Return why a result is in memory, and what to do about it."""
    if is_encrypted(result):
        return (
            f"they are encrypted or processed ({described(result.meta[MetaKey.PROCESSED_ALGORITHM])}), and such values "
            "are not tensors; give the server memory for the results of all clients, or remove the filter that does it"
        )
    if uses_tensor_streaming(fl_ctx):
        return (
            "NVFlare's tensor streaming transfers them; remove enable_tensor_streaming() from the recipe, or "
            "TensorServerStreamer and TensorClientStreamer from the configurations"
        )
    controller = job_context.controller_of(fl_ctx)
    if isinstance(controller, SwarmClientController) and not controller.enable_tensor_disk_offload:
        return (
            f"{type(controller).__name__} requests them in memory; set its enable_tensor_disk_offload, or use "
            "nvflare_lazy.recipes.SwarmLearningRecipe"
        )
    found = registered()
    if not found.complete:
        return f"other handlers replaced those of nvflare-lazy ({found}); remove the code that registers them"
    return (
        "the clients send them within their messages; on the clients, tensor_download_chunk_size and "
        "np_download_chunk_size must not be 0"
    )
