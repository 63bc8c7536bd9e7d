# SPDX-License-Identifier: Apache-2.0
"""A training script that ends its process, without any cleanup, as soon as its last result was sent.

Travels in the job's `custom` folder.
"""

from __future__ import annotations

import os

import nvflare.client as flare
import synthetic_model


def main() -> None:
    flare.init()
    site = int(flare.get_site_name().rsplit("-", 1)[-1])
    while flare.is_running():
        model = flare.receive()
        if model is None:
            break
        last = model.current_round == model.total_rounds - 1
        print(f"site {site} received {type(next(iter(model.params.values()))).__name__}", flush=True)
        params = {key: synthetic_model.step(model.params.pop(key), site) for key in list(model.params)}
        flare.send(flare.FLModel(params=params, params_type="FULL", meta={"NUM_STEPS_CURRENT_ROUND": site}))
        del model, params
        if last:
            print(f"site {site} has sent everything", flush=True)
            os._exit(0)


if __name__ == "__main__":
    main()
