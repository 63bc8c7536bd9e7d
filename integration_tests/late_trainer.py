# SPDX-License-Identifier: Apache-2.0
"""A training script that changes nothing; all sites but the first send some seconds after it.

Travels in the job's `custom` folder.
"""

from __future__ import annotations

import time

import nvflare.client as flare


def main() -> None:
    flare.init()
    late = not flare.get_site_name().endswith("-1")
    while flare.is_running():
        model = flare.receive()
        if model is None:
            break
        if late:
            time.sleep(5)
        flare.send(flare.FLModel(params=model.params, meta={"NUM_STEPS_CURRENT_ROUND": 1}))


if __name__ == "__main__":
    main()
