# SPDX-License-Identifier: Apache-2.0
"""NVFlare's context of a run, with an engine that knows some components, and results of clients in scratch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.app_constant import AppConstants

from nvflare_lazy import save
from nvflare_lazy.flare import LazyModelPersistor
from nvflare_lazy.formats import open_safetensors
from nvflare_lazy.scratch import JobScratch
from nvflare_lazy.transport import offload


class Engine:
    """Knows components by id, and remembers why they ended the job."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {}
        self.panics: list[str] = []

    def get_component(self, component_id: str) -> Any:
        return self.components.get(component_id)

    def new_context(self) -> FLContext:
        context = FLContext()
        context.set_prop(ReservedKey.ENGINE, self)
        return context

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.FATAL_SYSTEM_ERROR:
            self.panics.append(fl_ctx.get_prop(FLContextKey.EVENT_DATA))


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def fl_ctx(tmp_path, engine) -> FLContext:
    """The context of a run, in round 0."""
    (tmp_path / "app").mkdir()
    context = FLContext()
    context.set_prop(ReservedKey.ENGINE, engine)
    context.set_prop(FLContextKey.APP_ROOT, str(tmp_path / "app"))
    context.set_prop(AppConstants.CURRENT_ROUND, 0)
    return context


@pytest.fixture
def scratch(tmp_path) -> Iterator[JobScratch]:
    """The scratch of this process."""
    job = JobScratch.open(tmp_path / "scratch", job="test", min_free=0, warn=False)
    before = offload.runtime.use(offload.ReceiveMode(job, 32 << 20))
    yield job
    offload.runtime.use(before)
    job.release()


@pytest.fixture
def start(fl_ctx, scratch, engine) -> Callable[..., LazyModelPersistor]:
    """Starts a persistor and loads its model, which becomes the context's global model."""

    def start(**arguments: Any) -> LazyModelPersistor:
        arguments.setdefault("allow_numpy_conversion", False)
        persistor = LazyModelPersistor(**arguments)
        engine.components["persistor"] = persistor
        persistor.handle_event(EventType.START_RUN, fl_ctx)
        learnable = persistor.load_model(fl_ctx)
        if learnable is not None:
            fl_ctx.set_prop(AppConstants.GLOBAL_MODEL, learnable)
        return persistor

    return start


@pytest.fixture
def result(scratch) -> Callable[..., FLModel]:
    """Makes a client's result, on disk as it would have been received."""

    def make(client: str, steps: Any = 1, *, metrics: Any = None, kind: Any = ParamsType.FULL, **tensors: Any) -> Any:
        place = scratch.download(client)
        path = save({name: torch.as_tensor(value) for name, value in tensors.items()}, place.path / "r.safetensors")
        meta = {"client_name": client, "NUM_STEPS_CURRENT_ROUND": steps}
        tensors = open_safetensors(path)
        tensors.own(place)
        return FLModel(params=dict(tensors), params_type=kind, metrics=metrics, meta=meta)

    return make


def give(fl_ctx: FLContext, **tensors: Any) -> None:
    """Make these tensors the global model."""
    weights = {name: torch.as_tensor(value) for name, value in tensors.items()}
    fl_ctx.set_prop(AppConstants.GLOBAL_MODEL, make_model_learnable(weights, {}))


def receive_from(fl_ctx: FLContext, client: str, result: Shareable, *, claimed: str | None = None) -> None:
    """Make this the result that NVFlare is processing; its message may claim the name of another client."""
    result.set_header(ServerCommandKey.FL_CLIENT, Client(client, "token"))
    peer = FLContext()
    peer.set_prop(ReservedKey.IDENTITY_NAME, claimed or client, private=False)
    peer.set_prop(FLContextKey.SHAREABLE, result, private=True)
    result.set_peer_props(peer.get_all_public_props())
    fl_ctx.set_peer_context(peer)
    fl_ctx.set_prop(FLContextKey.TASK_RESULT, result)


def files_below(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
