# SPDX-License-Identifier: Apache-2.0
"""Lookup of the package's components, and of the global model, in NVFlare's context of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nvflare.apis.client import Client
from nvflare.apis.fl_constant import FLContextKey, ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.model import ModelLearnableKey
from nvflare.app_common.app_constant import AppConstants

from nvflare_lazy.transport import offload

if TYPE_CHECKING:
    from nvflare_lazy.flare.lazy_model_persistor import LazyModelPersistor
    from nvflare_lazy.flare.round_log import RoundLog
    from nvflare_lazy.flare.tensor_offload import TensorOffload

_PERSISTOR = "nvflare_lazy.persistor"
_OFFLOAD = "nvflare_lazy.offload"


def set_persistor(fl_ctx: FLContext, persistor: LazyModelPersistor) -> None:
    """Register the persistor."""
    fl_ctx.set_prop(_PERSISTOR, persistor, private=True, sticky=True)


def persistor_of(fl_ctx: FLContext | None) -> LazyModelPersistor | None:
    """Return the job's persistor if it is ours."""
    found: LazyModelPersistor | None = fl_ctx.get_prop(_PERSISTOR) if fl_ctx else None
    return found


def set_offload(fl_ctx: FLContext, offload: TensorOffload) -> None:
    """Register the offload component."""
    fl_ctx.set_prop(_OFFLOAD, offload, private=True, sticky=True)


def offload_of(fl_ctx: FLContext | None) -> TensorOffload | None:
    """Return the job's offload component, if it has one."""
    found: TensorOffload | None = fl_ctx.get_prop(_OFFLOAD) if fl_ctx else None
    return found


def round_log_of(fl_ctx: FLContext | None) -> RoundLog | None:
    """Return the log of rounds, if the job has one."""
    offload = offload_of(fl_ctx)
    return None if offload is None else offload.round_log


def global_weights(fl_ctx: FLContext | None) -> Mapping[str, Any] | None:
    """Return the global model that the controller sent, or None if there is none."""
    learnable = fl_ctx.get_prop(AppConstants.GLOBAL_MODEL) if fl_ctx else None
    weights = learnable.get(ModelLearnableKey.WEIGHTS) if isinstance(learnable, Mapping) else None
    return weights if isinstance(weights, Mapping) and weights else None


def sender_of(fl_ctx: FLContext) -> str | None:
    """Return the name of the process whose message NVFlare is processing, or None if there is none.

    For a client's result, this is the client whose token NVFlare has verified. The identity in the peer's context is
    only what the sender claims: it could be the name of another client, whose result would then be a second one.
    """
    peer = fl_ctx.get_peer_context()
    if peer is None:
        return None
    message = peer.get_prop(FLContextKey.SHAREABLE)
    client = message.get_header(ServerCommandKey.FL_CLIENT) if isinstance(message, Shareable) else None
    name: str | None = client.name if isinstance(client, Client) else peer.get_identity_name(default=None)
    return name


def release_scratch(fl_ctx: FLContext) -> None:
    """Release the default scratch at the end of a run; `TensorOffload` releases its own.

    Job processes end without running exit handlers.
    """
    if offload_of(fl_ctx) is None:
        offload.runtime.default_scratch.release()
