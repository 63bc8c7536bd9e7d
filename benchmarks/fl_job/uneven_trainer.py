# SPDX-License-Identifier: Apache-2.0
"""The client of the measured job with unequal sites: site-2 is slow, and site-3 diverges in round 1.

It has accuracy as a metric, which improves by round.
"""

from __future__ import annotations

import time

import nvflare.client as flare
import synthetic_model

import nvflare_lazy


def main() -> None:
    nvflare_lazy.install()
    flare.init()
    name = flare.get_site_name()
    site = int(name.rsplit("-", 1)[-1])
    while flare.is_running():
        model = flare.receive()
        if model is None:
            break
        number = model.current_round or 0
        time.sleep(4.0 if site == 2 else 1.0)
        params = {key: synthetic_model.step(model.params.pop(key), site) for key in list(model.params)}
        if site == 3 and number == 1:
            params[max(params)][7] = float("nan")
        accuracy = 0.9 - 0.4 / (number + 1) + site / 100
        flare.send(
            flare.FLModel(
                params=params,
                params_type="FULL",
                metrics={"accuracy": accuracy, "loss": 1 - accuracy},
                meta={"NUM_STEPS_CURRENT_ROUND": site},
            )
        )
        del params, model


if __name__ == "__main__":
    main()
