# SPDX-License-Identifier: Apache-2.0
"""Calls `nvflare_lazy.install()` when imported, for NVFlare's setting `nvflare_decomposers`.

`"nvflare_decomposers": "nvflare_lazy.flare.install"` in a site's `resources.json` makes all of the site's jobs receive
on disk. With `nvflare_lazy.flare.decomposers` instead, each job decides.
"""

from nvflare_lazy._system import leave_removed_directory

leave_removed_directory()

from nvflare_lazy.transport.registration import install  # noqa: E402 - imports torch

install()
