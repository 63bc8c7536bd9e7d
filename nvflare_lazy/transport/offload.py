# SPDX-License-Identifier: Apache-2.0
"""Whether what this process receives goes to disk, and where: one switch for the process, not one for each cell.

A job's component switches it on; NVFlare's own `enable_tensor_disk_offload` does so, too, on whatever cell NVFlare set
it. One process runs one job, in production as in the simulator.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from nvflare.fuel.utils.fobs import FOBSContextKey

from nvflare_lazy.scratch import current_job_scratch, use_job_scratch
from nvflare_lazy.transport import nvflare_private
from nvflare_lazy.transport.budget import BUDGET, DEFAULT_BYTES

if TYPE_CHECKING:
    from nvflare_lazy.scratch import JobScratch


class ReceiveMode(NamedTuple):
    """How this process receives.

    Attributes:
        on_disk: Whether payloads go to the job scratch; in memory otherwise.
        inflight_bytes: Bytes of memory that all downloads together may use in flight.
    """

    on_disk: bool
    inflight_bytes: int


_lock = threading.Lock()
_mode: ReceiveMode | None = None


def use(mode: ReceiveMode | None) -> ReceiveMode | None:
    """Receive in this mode; return the one before, for whoever puts it back.

    Args:
        mode: The mode; None leaves it to NVFlare's flag.
    """
    global _mode
    with _lock:
        before, _mode = _mode, mode
        BUDGET.resize(DEFAULT_BYTES if mode is None else mode.inflight_bytes)
        return before


def enable(scratch: JobScratch | None = None, *, inflight_bytes: int | None = None) -> None:
    """Send everything this process receives to disk from now on, tensors and arrays.

    Args:
        scratch: Where to; the job scratch that is in use, or one with defaults, if not given.
        inflight_bytes: Bytes of memory that all downloads together may take up on their way; unchanged if not given.
    """
    if scratch is not None:
        use_job_scratch(scratch)
    use(ReceiveMode(True, BUDGET.limit if inflight_bytes is None else inflight_bytes))


def disable() -> None:
    """Keep everything this process receives in memory, whatever NVFlare's flag says."""
    use(ReceiveMode(False, BUDGET.limit))


def reset() -> None:
    """Leave it to NVFlare's flag again."""
    use(None)


def destination(fobs_ctx: dict[str, Any] | None) -> JobScratch | None:
    """Return the scratch that what is being received goes to, or None if it stays in memory.

    Args:
        fobs_ctx: NVFlare's context of the message that is being decoded.
    """
    mode = _mode
    if mode is not None:
        on_disk = mode.on_disk
    else:
        on_disk = bool((fobs_ctx or {}).get(FOBSContextKey.TENSOR_DISK_OFFLOAD))
        on_disk = on_disk or nvflare_private.offload_flag_in_process()
    return current_job_scratch() if on_disk else None
