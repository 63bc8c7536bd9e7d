# SPDX-License-Identifier: Apache-2.0
"""A training script with `install()`: on the second site, SIGKILL ends it in the middle of its second download.

Travels in the job's `custom` folder. The downloads are counted in the directory DOWNLOADS, because the site may start a
trainer for each of them.
"""

from __future__ import annotations

import os
import pathlib
import signal

import nvflare.client as flare
import synthetic_model

import nvflare_lazy
from nvflare_lazy.scratch import ScratchFile

downloads = pathlib.Path(os.environ["DOWNLOADS"])
original = ScratchFile.pwrite


def pwrite(self, buffer, offset):
    done = original(self, buffer, offset)
    with (downloads / self.path.parent.name).open("a") as file:
        file.write("x")
        writes = file.tell()
    if writes == 3 and len(os.listdir(downloads)) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return done


def main() -> None:
    if "site-2" in os.getcwd():
        ScratchFile.pwrite = pwrite
    nvflare_lazy.install()
    flare.init()
    site = int(flare.get_site_name().rsplit("-", 1)[-1])
    while flare.is_running():
        model = flare.receive()
        if model is None:
            break
        params = {key: synthetic_model.step(model.params.pop(key), site) for key in list(model.params)}
        flare.send(flare.FLModel(params=params, params_type="FULL", meta={"NUM_STEPS_CURRENT_ROUND": site}))
        del model, params


if __name__ == "__main__":
    main()
