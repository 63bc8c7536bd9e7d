# SPDX-License-Identifier: Apache-2.0
"""`LazyCrossSiteEval`: cross-site evaluation that forwards models from disk.

NVFlare's controller writes each model as one serialized message and reads it back for every client that evaluates it,
completely in memory both times. This one writes a safetensors file and sends lazy tensors of it.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.workflows.cross_site_model_eval import CrossSiteModelEval

from nvflare_lazy.errors import NVFlareLazyError
from nvflare_lazy.flare.weights import as_weights, entries_of, holds_arrays, is_weight
from nvflare_lazy.formats import open_safetensors, save
from nvflare_lazy.transport.registration import register

_SUFFIX = ".safetensors"


class LazyCrossSiteEval(CrossSiteModelEval):
    """Accepts the arguments of NVFlare's `CrossSiteModelEval`.

    Example:
        >>> {"id": "cross_site_eval", "path": "nvflare_lazy.flare.LazyCrossSiteEval",
        ...  "args": {"model_locator_id": "locator"}}
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kinds: dict[str, tuple[str, dict[str, Any], bool]] = {}
        register()

    @classmethod
    def from_stock(cls, stock: CrossSiteModelEval) -> LazyCrossSiteEval:
        """Return a controller with the arguments of NVFlare's."""
        named = inspect.signature(CrossSiteModelEval.__init__).parameters
        return cls(**{name: getattr(stock, f"_{name}") for name in named if hasattr(stock, f"_{name}")})

    def _save_client_model(self, model_name: str, dxo: DXO, fl_ctx: FLContext) -> None:
        try:
            super()._save_client_model(model_name, dxo, fl_ctx)
        except (NVFlareLazyError, OSError) as error:
            # An exception here would end the task for all clients.
            self.log_warning(fl_ctx, f"Skipped the evaluation of the model of {model_name}: {error}", fire_event=False)

    def _save_dxo_content(self, name: str, save_dir: str, dxo: DXO, fl_ctx: FLContext) -> str:
        if dxo.data_kind not in (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF) or not all(map(is_weight, dxo.data.values())):
            path: str = super()._save_dxo_content(name, save_dir, dxo, fl_ctx)
            return path
        path = os.path.join(save_dir, name + _SUFFIX)
        numpy = holds_arrays(dxo.data)
        save({key: entry.lazy() for key, entry in entries_of(dxo.data).items()}, path)
        self._kinds[os.path.join(save_dir, name)] = (dxo.data_kind, dict(dxo.meta), numpy)
        return path

    def _load_validation_content(self, name: str, load_dir: str, fl_ctx: FLContext) -> DXO | None:
        known = self._kinds.get(os.path.join(load_dir, name))
        if known is None:
            return super()._load_validation_content(name, load_dir, fl_ctx)
        kind, meta, numpy = known
        tensors = open_safetensors(os.path.join(load_dir, name + _SUFFIX))
        return DXO(kind, data=as_weights(tensors.entries, numpy=numpy), meta=meta)
