# SPDX-License-Identifier: Apache-2.0
"""The client of the measured job: takes the global model, changes every tensor a little, sends it back.

It does not use lazy tensors explicitly, and holds one model at a time. This file travels in the job's `custom` folder
and runs inside the client process or as a separate process.
"""

from __future__ import annotations

import argparse
import os

import numpy as np
import nvflare.client as flare
import synthetic_model
import torch


def changed(value, site: int):
    if isinstance(value, np.ndarray):
        return synthetic_model.step(torch.from_numpy(np.asarray(value)), site).numpy()
    return synthetic_model.step(value, site)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--install", action="store_true", help="use the plugin in this process")
    parser.add_argument("--difference", action="store_true", help="send differences instead of weights")
    parser.add_argument("--config", help="the profile of a trainer that attaches to a job automatically")
    arguments, _ = parser.parse_known_args()
    if arguments.install:
        import nvflare_lazy

        nvflare_lazy.install()

    flare.init(config_file=arguments.config)
    name = flare.get_site_name()
    site = int(name.rsplit("-", 1)[-1])
    if "FL_JOB_PIDS" in os.environ:
        with open(os.path.join(os.environ["FL_JOB_PIDS"], f"trainer-{name}"), "w") as file:
            file.write(str(os.getpid()))
    while flare.is_running():
        model = flare.receive()
        if model is None:
            break
        old = model.params
        del model
        new = {}
        for key in list(old):
            value = old.pop(key)
            after = changed(value, site)
            new[key] = after - value if arguments.difference else after
            del value, after
        flare.send(
            flare.FLModel(
                params=new,
                params_type="DIFF" if arguments.difference else "FULL",
                metrics={"accuracy": 0.5 + site / 100},
                meta={"NUM_STEPS_CURRENT_ROUND": site},
            )
        )
        del new, old


if __name__ == "__main__":
    main()
