# SPDX-License-Identifier: Apache-2.0
"""The training script of the leaves: adds numbers of the site to each tensor instead of training."""

from __future__ import annotations

import nvflare.client as flare
from numbers_of_site import STEPS, changed


def main() -> None:
    flare.init()
    site = flare.get_site_name()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        params = {name: changed(site, name, value) for name, value in received.params.items()}
        flare.send(flare.FLModel(params=params, meta={"NUM_STEPS_CURRENT_ROUND": STEPS[site]}))


if __name__ == "__main__":
    main()
