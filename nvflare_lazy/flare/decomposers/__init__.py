# SPDX-License-Identifier: Apache-2.0
"""Calls `nvflare_lazy.install()` when imported, for NVFlare's setting `nvflare_decomposers`.

`"nvflare_decomposers": "nvflare_lazy.flare.decomposers"` in a site's `resources.json` makes all of its jobs lazy.
"""

import os


def _install() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        # The simulator imports this in a directory that it has removed. There torch's libraries would end the process.
        os.chdir("/")
    from nvflare_lazy.transport.registration import install

    install()


_install()
