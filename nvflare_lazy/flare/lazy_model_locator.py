# SPDX-License-Identifier: Apache-2.0
"""`LazyModelLocator`: offers the models of a `LazyModelPersistor` to cross-site evaluation, as lazy tensors."""

from __future__ import annotations

from nvflare.apis.dxo import DXO
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.model import model_learnable_to_dxo
from nvflare.app_common.abstract.model_locator import ModelLocator

from nvflare_lazy._text import logs_printably
from nvflare_lazy.errors import JobCheckpointError
from nvflare_lazy.flare.lazy_model_persistor import LazyModelPersistor


@logs_printably
class LazyModelLocator(ModelLocator):
    """Offers the persistor's models: the initial checkpoint, the last global model and the best one.

    Args:
        pt_persistor_id: The persistor's component id, as for NVFlare's `PTFileModelLocator`.

    Example:
        >>> {"id": "locator", "path": "nvflare_lazy.flare.LazyModelLocator", "args": {"pt_persistor_id": "persistor"}}
    """

    def __init__(self, pt_persistor_id: str = "persistor") -> None:
        super().__init__()
        self.pt_persistor_id = pt_persistor_id
        self._persistor: LazyModelPersistor | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            found = fl_ctx.get_engine().get_component(self.pt_persistor_id)
            if not isinstance(found, LazyModelPersistor):
                self.system_panic(
                    f"component {self.pt_persistor_id!r} is a {type(found).__name__}; LazyModelLocator needs a "
                    "LazyModelPersistor",
                    fl_ctx,
                )
                return
            self._persistor = found

    def get_model_names(self, fl_ctx: FLContext) -> list[str]:
        """Return the names of the available models."""
        return list(self._found().get_model_inventory(fl_ctx))

    def locate_model(self, model_name: str, fl_ctx: FLContext) -> DXO:
        """Return a model as lazy tensors."""
        learnable = self._found().get(model_name, fl_ctx)
        if learnable is None:
            raise JobCheckpointError(
                f"unknown model {model_name!r}; available: {', '.join(self.get_model_names(fl_ctx))}"
            )
        return model_learnable_to_dxo(learnable)

    def _found(self) -> LazyModelPersistor:
        if self._persistor is None:
            raise JobCheckpointError("models are not available before the run starts")
        return self._persistor
