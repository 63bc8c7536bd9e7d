# SPDX-License-Identifier: Apache-2.0
"""A training script for a model larger than memory: it loads, changes and writes one tensor at a time.

It sends the tensors of the file that it has written. This file travels in the job's `custom` folder.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nvflare.client as flare
import synthetic_model

import nvflare_lazy
from nvflare_lazy.formats import collect_state_dict_meta, save_safetensors_streaming


def main() -> None:
    if "--install" in sys.argv:
        nvflare_lazy.install()
    flare.init()
    site = int(flare.get_site_name().rsplit("-", 1)[-1])
    with tempfile.TemporaryDirectory(dir=".") as directory:
        file = Path(directory, "result.safetensors")
        while flare.is_running():
            model = flare.receive()
            if model is None:
                break
            received = model.params
            del model
            trained = ((name, synthetic_model.step(tensor, site)) for name, tensor in received.items())
            save_safetensors_streaming(trained, file, collect_state_dict_meta(received.items()))
            # Without a reference to its tensors, the received model leaves the disk.
            del received, trained
            result = dict(nvflare_lazy.open(file))
            flare.send(flare.FLModel(params=result, meta={"NUM_STEPS_CURRENT_ROUND": site}))
            del result


if __name__ == "__main__":
    main()
