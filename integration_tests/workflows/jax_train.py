# SPDX-License-Identifier: Apache-2.0
"""A client of JAX, which exchanges all parameters as one array, as NVFlare's example does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import nvflare.client as flare
from nvflare.app_common.np.constants import NPConstants


def main() -> None:
    flare.init()
    site = int(flare.get_site_name().rsplit("-", 1)[-1])
    gradient = jax.grad(lambda parameters: jnp.sum((parameters - site) ** 2))
    while flare.is_running():
        parameters = jnp.asarray(flare.receive().params[NPConstants.NUMPY_KEY])
        params = {NPConstants.NUMPY_KEY: np.asarray(parameters - 0.25 * gradient(parameters))}
        flare.send(flare.FLModel(params=params, metrics={"accuracy": 0.5}, meta={"NUM_STEPS_CURRENT_ROUND": 4}))


if __name__ == "__main__":
    main()
