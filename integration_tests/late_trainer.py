# SPDX-License-Identifier: Apache-2.0
"""A training script that changes nothing; all sites but the first send once the server has a result.

Travels in the job's `custom` folder.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import nvflare.client as flare


def main() -> None:
    flare.init()
    log = Path(os.environ["ROUND_LOG"])
    late = not flare.get_site_name().endswith("-1")
    while flare.is_running():
        model = flare.receive()
        if model is None:
            break
        while late and not (log.exists() and log.stat().st_size):
            time.sleep(0.05)
        flare.send(flare.FLModel(params=model.params, meta={"NUM_STEPS_CURRENT_ROUND": 1}))


if __name__ == "__main__":
    main()
