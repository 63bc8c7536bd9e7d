# SPDX-License-Identifier: Apache-2.0
"""`add_tensor_offload`: receiving on disk for a recipe of NVFlare's that otherwise stays as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvflare_lazy.flare.tensor_offload import TensorOffload
from nvflare_lazy.recipes.offload_options import OFFLOAD_ID, PACKAGE

if TYPE_CHECKING:
    from nvflare.recipe.spec import Recipe


def add_tensor_offload(recipe: Recipe, *, clients: bool = False, **arguments: Any) -> None:
    """Add the `TensorOffload` component to any recipe.

    Args:
        recipe: The recipe.
        clients: Whether the clients get the component, too; this package must be installed there.
        arguments: Arguments of the component.

    Example:
        >>> recipe = nvflare.app_opt.pt.recipes.FedAvgRecipe(aggregator=MyAggregator(), ...)
        >>> add_tensor_offload(recipe, scratch_dir="/data/scratch")
    """
    job = recipe._job
    # It is installed where the job runs: NVFlare would copy its sources into the job.
    job.set_app_packages([*job.job.app_packages, PACKAGE])
    job.to_server(TensorOffload(**arguments), id=OFFLOAD_ID)
    if clients:
        recipe._add_to_client_apps(TensorOffload(**arguments), id=OFFLOAD_ID)
