# SPDX-License-Identifier: Apache-2.0
"""The measured job's client, going wrong as it is told: `{"3": "garbage"}` in FAULTS makes site-3 do so in round 0.

Travels in the job's `custom` folder. Its client has no plugin: it sends a stock client's message, corrupted.
"""

from __future__ import annotations

import json
import os
import pathlib
import time

import nvflare.client as flare
import synthetic_model
import torch
from nvflare.app_opt.pt.tensor_downloader import TensorDownloadable

fault: str | None = None
original = TensorDownloadable.produce_item


def spoilt(self, index):
    item = original(self, index)
    if index >= 2 and fault == "garbage":
        return os.urandom(len(item))
    if index >= 2 and fault == "truncated":
        return item[: len(item) // 2]
    if index >= 2 and fault == "dies":
        os._exit(9)
    if index == 2 and fault == "pauses":
        time.sleep(15)
    if index == 2 and fault == "waits":
        # Prints this; then another process kills it.
        pathlib.Path(os.environ["WAITS"]).touch()
        time.sleep(3600)
    return item


TensorDownloadable.produce_item = spoilt
TensorDownloadable.prefetch_item = lambda self, index: None


def main() -> None:
    global fault
    flare.init()
    site = flare.get_site_name().rsplit("-", 1)[-1]
    while flare.is_running():
        model = flare.receive()
        if model is None:
            break
        first = not model.current_round
        fault = json.loads(os.environ["FAULTS"]).get(site) if first else None
        params = {key: synthetic_model.step(model.params.pop(key), int(site)) for key in list(model.params)}
        last = list(params)[-1]
        if fault == "shape":
            params[last] = torch.zeros(3, 5)
        elif fault == "nan":
            params[last][7] = float("nan")
        elif fault == "stranger":
            params["nobody.asked.for"] = torch.zeros(3)
        elif fault == "raises":
            raise RuntimeError("the trainer went wrong")
        elif fault == "empty":
            params = {}
        flare.send(flare.FLModel(params=params, params_type="FULL", meta={"NUM_STEPS_CURRENT_ROUND": int(site)}))
        del params


if __name__ == "__main__":
    main()
