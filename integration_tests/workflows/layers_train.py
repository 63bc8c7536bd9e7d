# SPDX-License-Identifier: Apache-2.0
"""A client that exchanges lists of arrays for each layer, as `get_weights` and `set_weights` of Keras do."""

from __future__ import annotations

import numpy as np
import nvflare.client as flare


def main() -> None:
    flare.init()
    site = int(flare.get_site_name().rsplit("-", 1)[-1])
    while flare.is_running():
        received = flare.receive()
        print(
            "received", {layer: [type(array).__name__ for array in arrays] for layer, arrays in received.params.items()}
        )
        params = {layer: [np.add(array, site) for array in arrays] for layer, arrays in received.params.items()}
        flare.send(flare.FLModel(params=params, metrics={"accuracy": 0.5}, meta={"NUM_STEPS_CURRENT_ROUND": 4}))


if __name__ == "__main__":
    main()
