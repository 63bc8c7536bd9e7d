# SPDX-License-Identifier: Apache-2.0
"""A training script with `install()` that does not end by itself: NVFlare ends it by a signal.

SIGTERM ends the first site's, and only SIGKILL the others'. Travels in the job's `custom` folder.
"""

from __future__ import annotations

import signal
import time

import nvflare.client as flare
import synthetic_model

import nvflare_lazy


def main() -> None:
    nvflare_lazy.install()
    flare.init()
    site = int(flare.get_site_name().rsplit("-", 1)[-1])
    if site != 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while flare.is_running():
        model = flare.receive()
        if model is None:
            break
        params = {key: synthetic_model.step(model.params.pop(key), site) for key in list(model.params)}
        flare.send(flare.FLModel(params=params, params_type="FULL", meta={"NUM_STEPS_CURRENT_ROUND": site}))
        del model, params
    time.sleep(3600)


if __name__ == "__main__":
    main()
