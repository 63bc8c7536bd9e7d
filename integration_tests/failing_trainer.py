# SPDX-License-Identifier: Apache-2.0
"""The measured job's client, failing in round 0 as FAULTS says: `{"3": "nan"}` makes site-3 send NaN.

Travels in the job's `custom` folder. No client answers before all clients in FAULTS have the task of round 0, and a
silent client answers when the file RELEASE exists.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import time

import nvflare.client as flare
import synthetic_model
import torch


def main() -> None:
    flare.init()
    site = int(flare.get_site_name().rsplit("-", 1)[-1])
    while flare.is_running():
        model = flare.receive()
        if model is None:
            break
        faults = {} if model.current_round else json.loads(os.environ["FAULTS"])
        fault = faults.get(str(site))
        if faults:
            pathlib.Path(f"{os.environ['RELEASE']}.{site}").touch()
        while not all(pathlib.Path(f"{os.environ['RELEASE']}.{other}").exists() for other in faults):
            time.sleep(0.05)
        params = {key: synthetic_model.step(model.params.pop(key), site) for key in list(model.params)}
        if fault == "raises":
            raise ValueError("no batch of 32 \x1b[31m images")
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "nan":
            params[next(iter(params))] = torch.full_like(torch.as_tensor(params[next(iter(params))]), float("nan"))
        if fault == "large":
            params["large"] = torch.zeros(4 << 20)
        while fault == "silent" and not pathlib.Path(os.environ["RELEASE"]).exists():
            time.sleep(0.1)
        flare.send(flare.FLModel(params=params, params_type="FULL", meta={"NUM_STEPS_CURRENT_ROUND": site}))
        del model, params


if __name__ == "__main__":
    main()
