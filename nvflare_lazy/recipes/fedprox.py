# SPDX-License-Identifier: Apache-2.0
"""`FedProxRecipe`: FedAvg with a proximal term, which keeps clients close to the global model."""

from __future__ import annotations

from typing import Any

from nvflare.app_common.utils.fedprox_utils import validate_fedprox_mu

from nvflare_lazy.recipes.fedavg import FedAvgRecipe


class FedProxRecipe(FedAvgRecipe):
    """FedProx for PyTorch: `FedAvgRecipe` that sends the proximal coefficient with every model.

    Training scripts apply it as with NVFlare's recipe.

    Args:
        fedprox_mu: The coefficient, positive.
    """

    def __init__(self, *, name: str = "fedprox", fedprox_mu: float = 0.01, **arguments: Any) -> None:
        self.fedprox_mu = validate_fedprox_mu(fedprox_mu)
        super().__init__(name=name, **arguments)

    def _get_controller_kwargs(self) -> dict[str, Any]:
        return {**super()._get_controller_kwargs(), "fedprox_mu": self.fedprox_mu}
