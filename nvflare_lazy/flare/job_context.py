# SPDX-License-Identifier: Apache-2.0
"""How components of ours find each other in a job: through NVFlare's own context, under names of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvflare.apis.fl_context import FLContext

from nvflare_lazy.scratch import reset_job_scratch

if TYPE_CHECKING:
    from nvflare_lazy.flare.lazy_model_persistor import LazyModelPersistor
    from nvflare_lazy.flare.round_log import RoundLog
    from nvflare_lazy.flare.tensor_offload import TensorOffload

_PERSISTOR = "nvflare_lazy.persistor"
_OFFLOAD = "nvflare_lazy.offload"
_ROUND_LOG = "nvflare_lazy.round_log"


def set_persistor(fl_ctx: FLContext, persistor: LazyModelPersistor) -> None:
    """Let others find the persistor."""
    fl_ctx.set_prop(_PERSISTOR, persistor, private=True, sticky=True)


def persistor_of(fl_ctx: FLContext | None) -> LazyModelPersistor | None:
    """Return the job's persistor if it is ours."""
    found: LazyModelPersistor | None = fl_ctx.get_prop(_PERSISTOR) if fl_ctx else None
    return found


def set_offload(fl_ctx: FLContext, offload: TensorOffload) -> None:
    """Let others find the offload component."""
    fl_ctx.set_prop(_OFFLOAD, offload, private=True, sticky=True)


def offload_of(fl_ctx: FLContext | None) -> TensorOffload | None:
    """Return the job's offload component, if it has one."""
    found: TensorOffload | None = fl_ctx.get_prop(_OFFLOAD) if fl_ctx else None
    return found


def set_round_log(fl_ctx: FLContext, log: RoundLog) -> None:
    """Let others find the log of rounds."""
    fl_ctx.set_prop(_ROUND_LOG, log, private=True, sticky=True)


def round_log_of(fl_ctx: FLContext | None) -> RoundLog | None:
    """Return the log of rounds, if somebody keeps one."""
    found: RoundLog | None = fl_ctx.get_prop(_ROUND_LOG) if fl_ctx else None
    return found


def release_scratch(fl_ctx: FLContext) -> None:
    """Release, at the end of a run, the scratch that nobody configured; the offload component sees to its own.

    Job processes end in a way that leaves nothing to do later.
    """
    if offload_of(fl_ctx) is None:
        reset_job_scratch()
