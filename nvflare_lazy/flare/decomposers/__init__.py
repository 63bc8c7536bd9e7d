# SPDX-License-Identifier: Apache-2.0
"""Registers this package's handlers when imported, for NVFlare's setting `nvflare_decomposers`.

`"nvflare_decomposers": "nvflare_lazy.flare.decomposers"` in a site's `resources.json` makes NVFlare's own switch
`enable_tensor_disk_offload` work for all of the site's jobs; `nvflare_lazy.flare.install` receives on disk without it.
"""

from nvflare_lazy._system import leave_removed_directory

leave_removed_directory()

from nvflare_lazy.transport.registration import register  # noqa: E402 - imports torch

register()
