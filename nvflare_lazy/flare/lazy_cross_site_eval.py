# SPDX-License-Identifier: Apache-2.0
"""`LazyCrossSiteEval`: cross-site evaluation that forwards models from disk.

NVFlare's controller writes each model as one serialized message and reads it back for every client that evaluates it,
completely in memory both times. This one writes a safetensors file and sends lazy tensors of it. Models of the server
that are on disk are not written again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nvflare.apis.dxo import DXO
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.workflows.cross_site_model_eval import CrossSiteModelEval

from nvflare_lazy._text import logs_printably, quoted
from nvflare_lazy.errors import ResultMismatchError
from nvflare_lazy.flare import job_context
from nvflare_lazy.flare.accepted_result import Expectation, accept_result, described, shown
from nvflare_lazy.flare.tensor_names import TensorNames, renamed
from nvflare_lazy.flare.weights import as_weights, entries_of, holds_arrays, is_weight
from nvflare_lazy.formats import open_safetensors, save
from nvflare_lazy.tensors.tensor_file import TensorFile
from nvflare_lazy.transport.registration import register

if TYPE_CHECKING:
    from nvflare_lazy.tensors.entry import TensorEntry

_SUFFIX = ".safetensors"
_MAX_NAME = 200


@logs_printably
class LazyCrossSiteEval(CrossSiteModelEval):
    """Accepts the arguments from `CrossSiteModelEval` in NVFlare.

    Example:
        >>> {"id": "cross_site_eval", "path": "nvflare_lazy.flare.LazyCrossSiteEval",
        ...  "args": {"model_locator_id": "locator"}}
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kinds: dict[str, tuple[str, dict[str, Any], bool]] = {}
        # The models of the server that are on disk. Those of clients are in scratch, from where they are copied.
        self._on_disk: dict[str, dict[str, TensorEntry]] = {}
        self._is_locating = False
        register()

    def _locate_server_models(self, fl_ctx: FLContext) -> bool:
        self._is_locating = True
        try:
            located: bool = super()._locate_server_models(fl_ctx)
            return located
        finally:
            self._is_locating = False

    def _accept_local_model(self, client_name: str, result: Shareable, fl_ctx: FLContext) -> None:
        with self._skipping(f"the model of {shown(client_name)}", fl_ctx):
            super()._accept_local_model(client_name, result, fl_ctx)

    def _accept_val_result(self, client_name: str, result: Shareable, fl_ctx: FLContext) -> None:
        with self._skipping(f"the evaluation by {shown(client_name)}", fl_ctx):
            # It becomes part of a path.
            owner = result.get_cookie(AppConstants.MODEL_OWNER, "")
            if not isinstance(owner, str) or owner not in {**self._server_models, **self._client_models}:
                raise ResultMismatchError(f"it is of an unknown model, {described(owner)}")
            super()._accept_val_result(client_name, result, fl_ctx)

    def _save_client_model(self, model_name: str, dxo: DXO, fl_ctx: FLContext) -> None:
        with self._skipping(f"the evaluation of the model of {shown(model_name)}", fl_ctx):
            _check_name(model_name)
            if job_context.kind_of_data(dxo.data_kind) and (not dxo.data or any(map(is_weight, dxo.data.values()))):
                dxo = _accepted(model_name, dxo, job_context.tensor_names(fl_ctx))
            else:
                # NVFlare ends the job if it cannot read a saved model.
                super()._save_dxo_content(model_name, self._cross_val_models_dir, dxo, fl_ctx)
                super()._load_validation_content(model_name, self._cross_val_models_dir, fl_ctx)
            super()._save_client_model(model_name, dxo, fl_ctx)

    def _save_validation_result(self, client_name: str, model_name: str, dxo: DXO, fl_ctx: FLContext) -> None:
        with self._skipping(f"the evaluation by {shown(client_name)}", fl_ctx):
            _check_name(client_name)
            super()._save_validation_result(client_name, model_name, dxo, fl_ctx)

    @contextmanager
    def _skipping(self, what: str, fl_ctx: FLContext) -> Iterator[None]:
        """Log an error: outside, it would end the task for all clients."""
        try:
            yield
        except Exception as error:
            self.log_warning(fl_ctx, f"Skipped {what}: {error}", fire_event=False)

    def _save_dxo_content(self, name: str, save_dir: str, dxo: DXO, fl_ctx: FLContext) -> str:
        if not job_context.kind_of_data(dxo.data_kind) or not all(map(is_weight, dxo.data.values())):
            path: str = super()._save_dxo_content(name, save_dir, dxo, fl_ctx)
            return path
        path = os.path.join(save_dir, name + _SUFFIX)
        numpy = holds_arrays(dxo.data)
        entries = entries_of(dxo.data)
        if self._is_locating and all(isinstance(entry.source.file(), TensorFile) for entry in entries.values()):
            self._on_disk[name] = entries
        else:
            save({key: entry.lazy() for key, entry in entries.items()}, path)
        self._kinds[os.path.join(save_dir, name)] = (dxo.data_kind, dict(dxo.meta), numpy)
        return path

    def _load_validation_content(self, name: str, load_dir: str, fl_ctx: FLContext) -> DXO | None:
        known = self._kinds.get(os.path.join(load_dir, name))
        if known is None:
            return super()._load_validation_content(name, load_dir, fl_ctx)
        kind, meta, numpy = known
        entries: Mapping[str, TensorEntry] | None = self._on_disk.get(name)
        if entries is None:
            entries = open_safetensors(os.path.join(load_dir, name + _SUFFIX)).entries
        return DXO(kind, data=as_weights(entries, numpy=numpy), meta=meta)


def _accepted(client: str, stated: DXO, names: TensorNames | None) -> DXO:
    result = accept_result(client, stated, Expectation())
    tensors = result.tensors
    if names is not None:
        # Each tensor once; the persistor sends it under all its names.
        stored = {*names.further.values(), *tensors} - names.further.keys()
        tensors = renamed(tensors, names.stored(tensors, stored))
    meta = {name: value for name, value in stated.meta.items() if type(value) in (str, bool, int, float)}
    return DXO(stated.data_kind, data=as_weights(tensors, numpy=result.numpy), meta=meta)


def _check_name(name: str) -> None:
    """Raise an error unless a name, which may have parts that a client chose, can be the name of a file."""
    if not name.isprintable() or len(name) > _MAX_NAME or os.path.basename(name) != name or name in ("", ".", ".."):
        raise ResultMismatchError(f"invalid name {quoted(name)}")
