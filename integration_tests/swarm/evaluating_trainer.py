# SPDX-License-Identifier: Apache-2.0
"""A client that trains and evaluates: its metric is the first element of the model."""

from __future__ import annotations

import nvflare.client as flare
import synthetic_model


def main() -> None:
    flare.init()
    site = int(flare.get_site_name().rpartition("-")[2])
    while flare.is_running():
        model = flare.receive()
        if model is None:
            break
        metrics = {"accuracy": float(model.params["layer00000"][0])}
        if flare.is_evaluate():
            flare.send(flare.FLModel(metrics=metrics))
            continue
        params = {name: synthetic_model.step(value, site) for name, value in model.params.items()}
        flare.send(flare.FLModel(params=params, metrics=metrics, meta={"NUM_STEPS_CURRENT_ROUND": site}))


if __name__ == "__main__":
    main()
