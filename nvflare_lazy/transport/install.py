# SPDX-License-Identifier: Apache-2.0
"""`install()`: one line for a training script, or for all jobs of a site, where no component of ours is configured.

It does for its process what `TensorOffload` does for a job's: handlers in place, and what comes goes to disk.
"""

from __future__ import annotations

import contextlib

from nvflare.fuel.f3.mpm import MainProcessMonitor

from nvflare_lazy.scratch import reset_job_scratch
from nvflare_lazy.transport import offload
from nvflare_lazy.transport.registration import Registration, register


def install() -> Registration:
    """Make NVFlare of this process send tensors and arrays in segments, and receive them on disk.

    What is received is lazy: `model.load_state_dict(received.params)` reads one tensor after the other. Whoever
    registered first; a second call changes nothing. Call it before messages are sent, so before `flare.init()`.

    Scratch is in `NVFLARE_LAZY_SCRATCH`, or where a `TensorOffload` of this process has it. For another place,
    `offload.enable(JobScratch.open(...))` goes after it; to receive into memory, `offload.disable()`.

    Returns:
        Who handles what now, and whose place was taken.

    Example:
        >>> print(nvflare_lazy.install())
        torch.Tensor by nvflare_lazy.transport.decomposers.LazyTensorDecomposer; ...
    """
    registration = register()
    offload.enable()
    # Job processes of NVFlare end without what Python does at exit. NVFlare refuses a function that it has already.
    with contextlib.suppress(RuntimeError):
        MainProcessMonitor.add_cleanup_cb(reset_job_scratch)
    return registration
