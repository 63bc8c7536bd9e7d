# SPDX-License-Identifier: Apache-2.0
"""NVFlare components, for a job's configuration, that keep the models of a federated job on disk.

TensorOffload           receives tensors on disk; the only component that an existing job needs
LazyAggregator          aggregates results within a memory budget, by any rule
LazyModelPersistor      saves the global model as safetensors checkpoints, without loading it
LazyModelLocator        offers these checkpoints to cross-site evaluation
LazyFedAvg              FedAvg that resumes after a restart, and need not wait for all clients
LazyScaffold            SCAFFOLD with its control variates on disk
LazyCrossSiteEval       cross-site evaluation that forwards models from disk
LazySwarmClientController   swarm learning in which clients aggregate on disk
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Before any module imports a name that another release of NVFlare may lack.
import nvflare_lazy.transport  # noqa: F401 - checks the version

if TYPE_CHECKING:
    from nvflare_lazy.flare.lazy_aggregator import LazyAggregator as LazyAggregator
    from nvflare_lazy.flare.lazy_cross_site_eval import LazyCrossSiteEval as LazyCrossSiteEval
    from nvflare_lazy.flare.lazy_fedavg import LazyFedAvg as LazyFedAvg
    from nvflare_lazy.flare.lazy_model_locator import LazyModelLocator as LazyModelLocator
    from nvflare_lazy.flare.lazy_model_persistor import LazyModelPersistor as LazyModelPersistor
    from nvflare_lazy.flare.lazy_scaffold import LazyScaffold as LazyScaffold
    from nvflare_lazy.flare.lazy_swarm_client_controller import LazySwarmClientController as LazySwarmClientController
    from nvflare_lazy.flare.tensor_offload import TensorOffload as TensorOffload

_LAZY_EXPORTS = {
    "LazyAggregator": "lazy_aggregator",
    "LazyCrossSiteEval": "lazy_cross_site_eval",
    "LazyFedAvg": "lazy_fedavg",
    "LazyModelLocator": "lazy_model_locator",
    "LazyModelPersistor": "lazy_model_persistor",
    "LazyScaffold": "lazy_scaffold",
    "LazySwarmClientController": "lazy_swarm_client_controller",
    "TensorOffload": "tensor_offload",
}

__all__ = [
    "LazyAggregator",
    "LazyCrossSiteEval",
    "LazyFedAvg",
    "LazyModelLocator",
    "LazyModelPersistor",
    "LazyScaffold",
    "LazySwarmClientController",
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
