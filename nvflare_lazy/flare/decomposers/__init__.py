# SPDX-License-Identifier: Apache-2.0
"""Importing this package is `nvflare_lazy.install()`, for NVFlare's setting that names a package to import.

`"nvflare_decomposers": "nvflare_lazy.flare.decomposers"` in a site's `resources.json` makes all of its jobs lazy.
"""

from nvflare_lazy.transport.install import install

install()
