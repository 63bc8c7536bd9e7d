# SPDX-License-Identifier: Apache-2.0
"""Lookup of the package's components, the global model and the aggregation of a job, in NVFlare's context."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvflare.apis.client import Client
from nvflare.apis.dxo import DataKind
from nvflare.apis.fl_constant import FLContextKey, ProcessType, ReservedKey, ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.model import ModelLearnableKey
from nvflare.app_common.aggregators.intime_accumulate_model_aggregator import InTimeAccumulateWeightedAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.ccwf.swarm_client_ctl import SwarmClientController
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_common.workflows.scaffold import Scaffold
from nvflare.edge.controllers.sage import ScatterAndGatherForEdge
from nvflare.edge.executors.hug import HierarchicalUpdateGatherer

from nvflare_lazy.flare.weights import is_weight
from nvflare_lazy.transport import offload

if TYPE_CHECKING:
    from nvflare_lazy.aggregation import ParamsType
    from nvflare_lazy.flare.lazy_model_persistor import LazyModelPersistor
    from nvflare_lazy.flare.round_log import RoundLog
    from nvflare_lazy.flare.tensor_names import TensorNames
    from nvflare_lazy.flare.tensor_offload import TensorOffload

#: The metadata key under which a model has the job, the round and the initial model that it is from, as JSON.
PROVENANCE_KEY = "nvflare_lazy.job"
_PERSISTOR = "nvflare_lazy.persistor"
_OFFLOAD = "nvflare_lazy.offload"
_ENCRYPTION = "nvflare.app_opt.he."
_KIND_OF_DATA: dict[str, ParamsType] = {DataKind.WEIGHTS: "FULL", DataKind.WEIGHT_DIFF: "DIFF"}


def set_persistor(fl_ctx: FLContext, persistor: LazyModelPersistor) -> None:
    """Register the persistor."""
    fl_ctx.set_prop(_PERSISTOR, persistor, private=True, sticky=True)


def persistor_of(fl_ctx: FLContext | None) -> LazyModelPersistor | None:
    """Return the job's persistor if it is ours."""
    found: LazyModelPersistor | None = fl_ctx.get_prop(_PERSISTOR) if fl_ctx else None
    return found


def tensor_names(fl_ctx: FLContext | None) -> TensorNames | None:
    """Return the names that clients use for the tensors of the job, if it started from a Hugging Face directory."""
    persistor = persistor_of(fl_ctx)
    return None if persistor is None else persistor.names


def set_offload(fl_ctx: FLContext, offload: TensorOffload) -> None:
    """Register the offload component."""
    fl_ctx.set_prop(_OFFLOAD, offload, private=True, sticky=True)


def offload_of(fl_ctx: FLContext | None) -> TensorOffload | None:
    """Return the job's offload component, if it has one."""
    found: TensorOffload | None = fl_ctx.get_prop(_OFFLOAD) if fl_ctx else None
    return found


def round_log_of(fl_ctx: FLContext | None) -> RoundLog | None:
    """Return the log of rounds, if the job has one."""
    offload = offload_of(fl_ctx)
    return None if offload is None else offload.round_log


def provenance(fl_ctx: FLContext | None, round_number: int | None) -> dict[str, str]:
    """Return the metadata that name the job of a model, its round, and the initial model of the job."""
    persistor = persistor_of(fl_ctx)
    origin = {
        "job": fl_ctx.get_job_id() if fl_ctx else None,
        "round": round_number,
        "base": persistor.base if persistor else None,
    }
    return {PROVENANCE_KEY: json.dumps({key: value for key, value in origin.items() if value is not None})}


def wants_values_in_memory(fl_ctx: FLContext) -> bool:
    """Whether something on this client uses tensors that pass through it to or from a trainer, and may write to them.

    NVFlare requests these in memory when it finds references, and would find none if they were on disk already.
    """
    runner = fl_ctx.get_prop(FLContextKey.RUNNER)
    engine = fl_ctx.get_engine()
    components: dict[str, Any] = getattr(engine, "get_all_components", dict)()
    users = [*components.values(), *_executors(runner)]
    filters = [getattr(runner, name, None) for name in ("task_data_filters", "task_result_filters")]
    scope = fl_ctx.get_prop(FLContextKey.SCOPE_OBJECT)
    for name in ("task_data_filters", "task_result_filters"):
        filters += (getattr(scope, name, None) or {}).values()
    return any(filters) or any(
        hasattr(user, "requires_materialized_task_result") or not getattr(user, "enable_tensor_disk_offload", True)
        for user in users
    )


def global_weights(fl_ctx: FLContext | None) -> Mapping[str, Any] | None:
    """Return the global model that the controller sent, or None without one.

    The first one in NVFlare's recipes for scikit-learn has settings instead of tensors.
    """
    learnable = fl_ctx.get_prop(AppConstants.GLOBAL_MODEL) if fl_ctx else None
    weights = learnable.get(ModelLearnableKey.WEIGHTS) if isinstance(learnable, Mapping) else None
    return weights if isinstance(weights, Mapping) and any(map(is_weight, weights.values())) else None


def keep_global_weights(fl_ctx: FLContext) -> None:
    """Keep the names of the global model on a client, whose training script gets the same dictionary and may change it.

    Swarm learning compares results with the model, and saves it if it is the best.
    """
    learnable, weights = fl_ctx.get_prop(AppConstants.GLOBAL_MODEL), global_weights(fl_ctx)
    if weights is not None:
        learnable[ModelLearnableKey.WEIGHTS] = dict(weights)


def sender_of(fl_ctx: FLContext) -> str | None:
    """Return the name of the process whose message NVFlare is processing, or None without a message.

    For a client's result, this is the client whose token NVFlare has verified. The identity in the peer's context is
    only what the sender claims: it could be the name of another client, whose result would then be a second one.
    """
    peer = fl_ctx.get_peer_context()
    if peer is None:
        return None
    # Only the server knows tokens. In swarm learning, a client that aggregates has what the sender claims.
    is_client = fl_ctx.get_process_type() == ProcessType.CLIENT_JOB
    message = None if is_client else peer.get_prop(FLContextKey.SHAREABLE)
    client = message.get_header(ServerCommandKey.FL_CLIENT) if isinstance(message, Shareable) else None
    name: str | None = client.name if isinstance(client, Client) else peer.get_identity_name(default=None)
    return name


def kind_of_data(data_kind: object) -> ParamsType | None:
    """Return whether NVFlare's kind of data is a model or a difference, or None if it is neither."""
    return _KIND_OF_DATA.get(data_kind) if isinstance(data_kind, str) else None


@dataclass(frozen=True)
class RunningAggregation:
    """Properties of the aggregation of the running workflow, as far as they are known.

    Attributes:
        exclude: Tensors whose names match are excluded by the controller or its aggregator.
        by_nvflare: Whether it is NVFlare's own weighted mean, which adds each result when it arrives.
        first_kind_wins: Whether the first result of a round decides for NVFlare what the others are.
        params_type: "FULL" or "DIFF" if the aggregator expects one of them.
        ignores_zero_steps: Whether a result of 0 steps has the weight 0, which the mean may divide by.
        has_controls: Whether it is NVFlare's SCAFFOLD, which also averages control variates, and ends the job if a
            result is empty.
        adds_encrypted: Whether it adds encrypted values, which nothing else can check.
    """

    exclude: re.Pattern[str] | None = None
    by_nvflare: bool = False
    first_kind_wins: bool = False
    params_type: ParamsType | None = None
    ignores_zero_steps: bool = False
    has_controls: bool = False
    adds_encrypted: bool = False


def running_aggregation(fl_ctx: FLContext) -> RunningAggregation:
    """Return the known properties of the aggregation of the running workflow."""
    controller = controller_of(fl_ctx)
    aggregator: Any = getattr(controller, "aggregator", None)
    exclude: Any
    # These classes can only be imported with TenSEAL.
    if any(base.__module__.startswith(_ENCRYPTION) for base in type(aggregator).__mro__):
        return RunningAggregation(adds_encrypted=True)
    if type(aggregator) is InTimeAccumulateWeightedAggregator:
        exclude, kinds = (_of_single_dxo(found) for found in (aggregator.exclude_vars, aggregator.expected_data_kind))
        kind = kind_of_data(kinds)
        return RunningAggregation(_pattern(exclude), kind is not None, params_type=kind, ignores_zero_steps=True)
    if isinstance(controller, (FedAvg, Scaffold)) and aggregator is None:
        exclude = getattr(controller, "exclude_vars", None)
        has_controls = isinstance(controller, Scaffold)
        return RunningAggregation(_pattern(exclude), True, first_kind_wins=True, has_controls=has_controls)
    return RunningAggregation(_pattern(getattr(aggregator, "exclude_vars", None)))


def trainers(fl_ctx: FLContext) -> list[str]:
    """Return the clients whose results this client aggregates in swarm learning."""
    found = getattr(controller_of(fl_ctx), "trainers", None)
    return list(found or ())


def controller_of(fl_ctx: FLContext) -> Any:
    """Return the controller of the running workflow, which is an executor in swarm learning, or None."""
    runner = fl_ctx.get_prop(FLContextKey.RUNNER)
    if fl_ctx.get_process_type() != ProcessType.CLIENT_JOB:
        return getattr(getattr(runner, "current_wf", None), "controller", None)
    return next((executor for executor in _executors(runner) if isinstance(executor, SwarmClientController)), None)


def is_middle_of_tree(fl_ctx: FLContext | None) -> bool:
    """Whether this client gathers the results of other clients and passes their aggregate upward."""
    if fl_ctx is None or fl_ctx.get_process_type() != ProcessType.CLIENT_JOB or fl_ctx.get_prop(ReservedKey.IS_LEAF):
        return False
    return any(
        isinstance(found, HierarchicalUpdateGatherer) for found in _executors(fl_ctx.get_prop(FLContextKey.RUNNER))
    )


def is_top_of_tree(fl_ctx: FLContext) -> bool:
    """Whether this server gets the aggregates of subtrees."""
    return isinstance(controller_of(fl_ctx), ScatterAndGatherForEdge)


def is_in_tree(fl_ctx: FLContext | None) -> bool:
    """Whether this server or client may get the aggregates of subtrees."""
    return fl_ctx is not None and (is_top_of_tree(fl_ctx) or is_middle_of_tree(fl_ctx))


def _executors(runner: Any) -> Iterable[Any]:
    found: Iterable[Any] = getattr(getattr(runner, "task_router", None), "task_table", {}).values()
    return found


def _of_single_dxo(setting: Any) -> Any:
    # NVFlare's aggregator keeps settings for collections; those of a single one have the name "".
    return setting.get("") if isinstance(setting, dict) else setting


def _pattern(exclude: Any) -> re.Pattern[str] | None:
    return re.compile(exclude) if isinstance(exclude, str) and exclude else None


def release_scratch(fl_ctx: FLContext) -> None:
    """Release the default scratch at the end of a run; `TensorOffload` releases its own.

    Job processes end without running exit handlers.
    """
    if offload_of(fl_ctx) is None:
        offload.runtime.default_scratch.release()
