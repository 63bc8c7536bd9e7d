# SPDX-License-Identifier: Apache-2.0
"""A training script with a custom model, which records the received values, and its memory in addition to the model.

With LINGER in the environment it does not end alone: SIGTERM ends the first site's, and only SIGKILL the others'.
Travels in the job's `custom` folder.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import threading
import time

import nvflare.client as flare
import synthetic_model


def anonymous() -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise LookupError("RssAnon")


class Peak(threading.Thread):
    """The most memory from its start on."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.most = anonymous()
        self.start()

    def run(self) -> None:
        while True:
            self.most = max(self.most, anonymous())
            time.sleep(0.002)


def main() -> None:
    if "--install" in sys.argv:
        import nvflare_lazy

        nvflare_lazy.install()
    tensors, elements = json.loads(os.environ["SIZES"])
    model = synthetic_model.SyntheticModel(tensors, elements)
    peak = Peak()
    flare.init()
    site = int(flare.get_site_name().rsplit("-", 1)[-1])
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        types = sorted({type(value).__name__ for value in received.params.values()})
        model.load_state_dict(received.params)
        del received
        for parameter in model.parameters():
            parameter.mul_(1 + site / 128).add_(site * 1e-3)
        flare.send(flare.FLModel(params=model.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": site}))
        with open(os.environ["WITNESS"], "a") as file:
            file.write(json.dumps({"beside the model": peak.most - peak.before, "types": types}) + "\n")
    if "LINGER" in os.environ:
        if site != 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)


if __name__ == "__main__":
    main()
