# SPDX-License-Identifier: Apache-2.0
"""Replacements for NVFlare's PyTorch recipes: the same arguments and more, and flat memory on the server.

    from nvflare_lazy.recipes import FedAvgRecipe  # instead of nvflare.app_opt.pt.recipes

`options` describes the arguments they add. `make_lazy` is for all other recipes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Before any module imports a name that another release of NVFlare may lack.
import nvflare_lazy.flare  # noqa: F401 - checks the version

if TYPE_CHECKING:
    from nvflare_lazy.recipes.fedavg import FedAvgRecipe as FedAvgRecipe
    from nvflare_lazy.recipes.fedopt import FedOptRecipe as FedOptRecipe
    from nvflare_lazy.recipes.fedprox import FedProxRecipe as FedProxRecipe
    from nvflare_lazy.recipes.options import make_lazy as make_lazy
    from nvflare_lazy.recipes.scaffold import ScaffoldRecipe as ScaffoldRecipe
    from nvflare_lazy.recipes.swarm import SwarmLearningRecipe as SwarmLearningRecipe

_LAZY_EXPORTS = {
    "FedAvgRecipe": "fedavg",
    "FedOptRecipe": "fedopt",
    "FedProxRecipe": "fedprox",
    "ScaffoldRecipe": "scaffold",
    "SwarmLearningRecipe": "swarm",
    "make_lazy": "options",
}

__all__ = [
    "FedAvgRecipe",
    "FedOptRecipe",
    "FedProxRecipe",
    "ScaffoldRecipe",
    "SwarmLearningRecipe",
    "make_lazy",
]


def __getattr__(name: str) -> Any:
    home = _LAZY_EXPORTS.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
