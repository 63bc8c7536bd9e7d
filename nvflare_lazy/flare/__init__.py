# SPDX-License-Identifier: Apache-2.0
"""What a job's configuration names: NVFlare components that keep a federated job's models on disk.

TensorOffload           what this process receives goes to disk; enough for an existing job
LazyAggregator          combines results within a memory budget, by any rule
LazyModelPersistor      the global model as safetensors checkpoints, never whole in memory
LazyModelLocator        its models for cross-site evaluation
LazyFedAvg              FedAvg that resumes, and goes on without the clients it does not need
LazyScaffold            SCAFFOLD with its control variates on disk
LazyCrossSiteEval       cross-site evaluation that keeps the models it passes on on disk
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvflare_lazy.flare.lazy_aggregator import LazyAggregator as LazyAggregator
    from nvflare_lazy.flare.lazy_cross_site_eval import LazyCrossSiteEval as LazyCrossSiteEval
    from nvflare_lazy.flare.lazy_fedavg import LazyFedAvg as LazyFedAvg
    from nvflare_lazy.flare.lazy_model_locator import LazyModelLocator as LazyModelLocator
    from nvflare_lazy.flare.lazy_model_persistor import LazyModelPersistor as LazyModelPersistor
    from nvflare_lazy.flare.lazy_scaffold import LazyScaffold as LazyScaffold
    from nvflare_lazy.flare.tensor_offload import TensorOffload as TensorOffload

_LAZY_EXPORTS = {
    "LazyAggregator": "lazy_aggregator",
    "LazyCrossSiteEval": "lazy_cross_site_eval",
    "LazyFedAvg": "lazy_fedavg",
    "LazyModelLocator": "lazy_model_locator",
    "LazyModelPersistor": "lazy_model_persistor",
    "LazyScaffold": "lazy_scaffold",
    "TensorOffload": "tensor_offload",
}

__all__ = [
    "LazyAggregator",
    "LazyCrossSiteEval",
    "LazyFedAvg",
    "LazyModelLocator",
    "LazyModelPersistor",
    "LazyScaffold",
    "TensorOffload",
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
