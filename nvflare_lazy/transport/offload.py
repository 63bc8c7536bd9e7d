# SPDX-License-Identifier: Apache-2.0
"""Whether what this process receives goes to disk, and where: one switch for the process, not one for each cell.

A job's component switches it on; NVFlare's own `enable_tensor_disk_offload` does so, too, on whatever cell NVFlare set
it. One process runs one job, in production as in the simulator.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from nvflare.fuel.utils.fobs import FOBSContextKey

from nvflare_lazy.scratch import current_job_scratch, use_job_scratch
from nvflare_lazy.transport import nvflare_private
from nvflare_lazy.transport.budget import BUDGET

if TYPE_CHECKING:
    from nvflare_lazy.scratch import JobScratch

_lock = threading.Lock()
_enabled: bool | None = None


def enable(scratch: JobScratch | None = None, *, inflight_bytes: int | None = None) -> None:
    """Send everything this process receives to disk from now on, tensors and arrays.

    Args:
        scratch: Where to; the job scratch that is in use, or one with defaults, if not given.
        inflight_bytes: Bytes of memory that all downloads together may take up on their way; unchanged if not given.
    """
    global _enabled
    if inflight_bytes is not None:
        BUDGET.resize(inflight_bytes)
    with _lock:
        if scratch is not None:
            use_job_scratch(scratch)
        _enabled = True


def disable() -> None:
    """Keep everything this process receives in memory, whatever NVFlare's flag says."""
    global _enabled
    with _lock:
        _enabled = False


def reset() -> None:
    """Leave it to NVFlare's flag again."""
    global _enabled
    with _lock:
        _enabled = None


def destination(fobs_ctx: dict[str, Any] | None) -> JobScratch | None:
    """Return the scratch that what is being received goes to, or None if it stays in memory.

    Args:
        fobs_ctx: NVFlare's context of the message that is being decoded.
    """
    wanted = _enabled
    if wanted is None:
        wanted = bool((fobs_ctx or {}).get(FOBSContextKey.TENSOR_DISK_OFFLOAD))
        wanted = wanted or nvflare_private.offload_flag_in_process()
    return current_job_scratch() if wanted else None
