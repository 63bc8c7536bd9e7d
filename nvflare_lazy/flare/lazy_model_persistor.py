# SPDX-License-Identifier: Apache-2.0
"""`LazyModelPersistor`: loads and saves a job's global model on disk, tensor by tensor.

A round starts with lazy tensors of a file. To save, the persistor adds a name to the file that aggregation wrote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nvflare.apis.dxo import DXO, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ProcessType, WorkspaceConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.app_common.abstract.model import (
    ModelLearnable,
    ModelLearnableKey,
    make_model_learnable,
    validate_model_learnable,
)
from nvflare.app_common.abstract.model_persistor import ModelPersistor
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.model_desc import ModelDescriptor

from nvflare_lazy._text import logs_printably, parse_size, quoted
from nvflare_lazy.aggregation.schema import listed
from nvflare_lazy.errors import FormatError, InitialModelError, JobCheckpointError, NVFlareLazyError
from nvflare_lazy.flare import initial_model, job_context
from nvflare_lazy.flare.checkpoint_store import Checkpoint, CheckpointStore
from nvflare_lazy.flare.result_models import leave_models
from nvflare_lazy.flare.tensor_names import TensorNames
from nvflare_lazy.flare.weights import as_weights, entries_of, is_weight
from nvflare_lazy.formats import open as open_checkpoint
from nvflare_lazy.formats.hugging_face import ModelDirectory
from nvflare_lazy.formats.hugging_face.model_names import ModelNames, model_names
from nvflare_lazy.records import FILE_NAME
from nvflare_lazy.remote.url import basename, display, is_url
from nvflare_lazy.transport.registration import register

if TYPE_CHECKING:
    from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict

MODEL_NAME = "FL_global_model.safetensors"
BEST_NAME = "best_FL_global_model.safetensors"
SUFFIX = ".safetensors"
MODEL_FORMAT = "safetensors"


@logs_printably
class LazyModelPersistor(ModelPersistor):
    """Keeps the global model in safetensors files.

    The initial model of the job is the first of these that exists: the last complete round in `checkpoint_dir`, the
    checkpoint `source_ckpt_file_full_name`, the model.

    A job that starts from a Hugging Face directory (a model or a PEFT adapter) sends tied tensors under all their names
    and stores them once. `from_pretrained` loads its checkpoint directory, and the directories of the best model and of
    rounds in it.

    At the end of the job, its run directory has each model once, even with `checkpoint_dir`, and the file
    `artifact_manifest.json`, by which `nvflare job download --format json` finds the global model.

    | `model`                                                           | is instantiated                        |
    |-------------------------------------------------------------------|----------------------------------------|
    | `{"path": "net.Net", "args": {…}, "config_type": "dict"}`         | by a separate process, which ends      |
    | `{"path": "net.Net", "args": {…}}`                                | by NVFlare, in the server; then freed  |
    | the id of a component, a `torch.nn.Module`                        | by NVFlare, in the server; then freed  |

    Args:
        model: The model, in one of these forms.
        exclude_vars: Regular expression; parameters whose names match it are excluded from the job. The checkpoints of
            a job that started from a Hugging Face directory have their initial values.
        global_model_file_name: File of the last global model. In a job that starts from a Hugging Face directory, the
            file has the name that `from_pretrained` expects.
        best_global_model_file_name: File of the best one; in such a job, it is in the directory `best`.
        source_ckpt_file_full_name: Initial checkpoint of any readable kind, or a Hugging Face directory; a relative
            path is searched in the app's `custom` folder.
        filter_id: A `PersistorFilter` component.
        allow_numpy_conversion: Whether the job exchanges NumPy arrays, as with NVFlare's persistor; False for PyTorch
            tensors.
        checkpoint_dir: Directory of the checkpoints. Outside the job's workspace, they outlive the job, and a
            restarted job resumes from them. Default: the app's folder, as for NVFlare's checkpoints.
        keep_rounds: Number of rounds to keep, plus the best model. Default: 2 in `checkpoint_dir`, otherwise 1.
        save_pytorch: Whether the run directory has the last and the best model as PyTorch files in NVFlare's layout at
            the end, for tools that expect those, instead of safetensors files. A Hugging Face directory stays.
        max_shard_size: Split larger checkpoints, for example "5GB". Default: as the initial Hugging Face directory is
            split.

    Example:
        >>> {"id": "persistor", "path": "nvflare_lazy.flare.LazyModelPersistor",
        ...  "args": {"source_ckpt_file_full_name": "/models/llama", "allow_numpy_conversion": False}}
    """

    def __init__(
        self,
        model: torch.nn.Module | dict[str, Any] | str | None = None,
        exclude_vars: str | None = None,
        global_model_file_name: str = MODEL_NAME,
        best_global_model_file_name: str = BEST_NAME,
        source_ckpt_file_full_name: str | None = None,
        filter_id: str | None = None,
        allow_numpy_conversion: bool = True,
        checkpoint_dir: str | None = None,
        keep_rounds: int | None = None,
        save_pytorch: bool = False,
        max_shard_size: int | str | None = None,
    ) -> None:
        super().__init__(filter_id=filter_id)
        for name in (global_model_file_name, best_global_model_file_name):
            if Path(name).name != name or not name.endswith(SUFFIX):
                raise ValueError(
                    f"invalid model file name {name!r}: expected a name that ends with {SUFFIX}; "
                    "set save_pytorch=True to also write a PyTorch file"
                )
        if keep_rounds is None:
            keep_rounds = 1 if checkpoint_dir is None else 2
        if keep_rounds < 1:
            raise ValueError(f"keep_rounds must be >= 1, got {keep_rounds}")
        if checkpoint_dir is not None and not Path(checkpoint_dir).is_absolute():
            raise ValueError(f"checkpoint_dir {checkpoint_dir!r} must be an absolute path on the server")
        if max_shard_size is not None:
            parse_size(max_shard_size)
        self.model = model
        self.exclude_vars = exclude_vars
        self.global_model_file_name = global_model_file_name
        self.best_global_model_file_name = best_global_model_file_name
        self.source_ckpt_file_full_name = source_ckpt_file_full_name
        self.allow_numpy_conversion = allow_numpy_conversion
        self.checkpoint_dir = checkpoint_dir
        self.keep_rounds = keep_rounds
        self.max_shard_size = max_shard_size
        self.save_pytorch = save_pytorch
        self._store: CheckpointStore | None = None
        #: The round the job resumes after, or None if it starts at the beginning.
        self.resumed: Checkpoint | None = None
        # The current model: an update must match it, and keeps the tensors that it does not contain.
        self._current: dict[str, Any] = {}
        self._workflow_ctx: FLContext | None = None
        self._meta: Mapping[str, Any] = {}
        #: The names that clients use for tensors, if the job started from a Hugging Face directory.
        self.names: TensorNames | None = None
        # The tensors of that directory that `exclude_vars` excludes from the job, but not from its checkpoints.
        self._left_out: dict[str, Any] = {}
        register()

    # ---- for other components of this package ------------------------------------------------------------------------

    @property
    def store(self) -> CheckpointStore:
        """The job's checkpoints, from the start of the run on."""
        if self._store is None:
            raise JobCheckpointError("the persistor has no checkpoints before the run starts")
        return self._store

    @property
    def base(self) -> str | None:
        """The checkpoint or the class that the job configures as its initial model."""
        if self.source_ckpt_file_full_name is not None:
            return display(self.source_ckpt_file_full_name)
        return str(self.model["path"]) if isinstance(self.model, dict) and "path" in self.model else None

    def use_client_names(self, task: object) -> None:
        """Give the tensors of a task the names that clients have for them; in swarm learning, each client does it."""
        if self.names is None or not self.names.further or not isinstance(task, Shareable):
            return
        if task.get_header(ReservedHeaderKey.CONTENT_TYPE) != "DXO":
            return
        dxo = from_shareable(task)
        if job_context.kind_of_data(dxo.data_kind) is None:
            return
        # SCAFFOLD sends control variates in the metadata.
        controls = {key: self.names.of_clients(part) for key, part in dxo.meta.items() if isinstance(part, dict)}
        DXO(dxo.data_kind, self.names.of_clients(dxo.data), {**dxo.meta, **controls}).update_shareable(task)

    # ---- NVFlare's side ------------------------------------------------------------------------------------------

    def handle_event(self, event: str, fl_ctx: FLContext) -> None:
        if event == EventType.START_RUN:
            self._start(fl_ctx)
        elif event == EventType.BEFORE_TASK_DATA_FILTER and fl_ctx.get_process_type() != ProcessType.CLIENT_JOB:
            self.use_client_names(fl_ctx.get_prop(FLContextKey.TASK_DATA))
        elif event == AppEventType.GLOBAL_BEST_MODEL_AVAILABLE:
            self._save_best(fl_ctx)
        elif event == EventType.END_RUN:
            self._current, self._left_out, self._workflow_ctx = {}, {}, None
            if self._store is not None:
                self._store.clear_incoming()
                self._leave_models(fl_ctx)
                self._store.release()
            job_context.release_scratch(fl_ctx)

    def load_model(self, fl_ctx: FLContext) -> ModelLearnable | None:
        """Return the initial model of the job, as lazy tensors or arrays."""
        if self._store is None:
            return None  # the start of the run has ended the job, with the reason
        try:
            tensors = self._begin(fl_ctx)
            self._keep_records(fl_ctx)
            self._complete_checkpoints(tensors, fl_ctx)
            included = self._included(tensors)
            self._warn_of_settings(len(included) < len(tensors), fl_ctx)
            weights = as_weights(included, numpy=self.allow_numpy_conversion)
        except (NVFlareLazyError, OSError) as error:
            self.log_error(fl_ctx, f"Cannot load the initial model: {error}")
            self.system_panic(reason=f"cannot load the initial model: {error}", fl_ctx=fl_ctx)
            return None
        self._current, self._workflow_ctx = dict(weights), fl_ctx
        return make_model_learnable(weights, dict(self._meta))

    def save_model(self, ml: ModelLearnable, fl_ctx: FLContext) -> None:
        """Save the global model of the current round."""
        round_number = fl_ctx.get_prop(AppConstants.CURRENT_ROUND)
        weights = self._merged(ml)
        path = self.store.save({**self._left_out, **weights}, round_number, self._meta)
        if self._workflow_ctx is not None:
            # A context caches what it reads, and NVFlare's context of the workflow would keep the initial model on the
            # disk until the job ends. Reading the property again replaces it.
            self._workflow_ctx.get_prop(AppConstants.GLOBAL_MODEL)
        log = job_context.round_log_of(fl_ctx)
        if log is not None:
            log.on_saved(path)
        self.log_info(fl_ctx, f"Saved the global model of round {round_number} as {path}", fire_event=False)

    def get_model_inventory(self, fl_ctx: FLContext) -> dict[str, ModelDescriptor]:
        """Return the models that can be evaluated, by name."""
        paths: dict[str, Path | str] = {**self.store.models()}
        source = self._source(fl_ctx)
        if isinstance(source, str):
            paths = {basename(source): source, **paths}
        elif source is not None and source.exists():
            paths = {source.name: source, **paths}
        return {
            name: ModelDescriptor(
                name=name,
                location=str(path),
                model_format=MODEL_FORMAT,
                props={"source": "initial_ckpt"} if path == source else {},
            )
            for name, path in paths.items()
        }

    def get_model(self, model_file: str, fl_ctx: FLContext) -> ModelLearnable | None:
        """Return one of these models, as lazy tensors or arrays."""
        found = self.get_model_inventory(fl_ctx).get(model_file)
        if found is None:
            return None
        tensors = initial_model.from_checkpoint(found.location)
        return make_model_learnable(as_weights(self._included(tensors), numpy=self.allow_numpy_conversion), {})

    # ---- how -----------------------------------------------------------------------------------------------------

    def _start(self, fl_ctx: FLContext) -> None:
        directory = Path(self.checkpoint_dir or fl_ctx.get_prop(FLContextKey.APP_ROOT))
        try:
            store = CheckpointStore(
                directory,
                self.global_model_file_name,
                self.best_global_model_file_name,
                keep_rounds=self.keep_rounds,
                max_shard_size=None if self.max_shard_size is None else parse_size(self.max_shard_size),
            )
            if self.checkpoint_dir is not None:
                store.lease(fl_ctx.get_job_id() or "")
            store.clear_incoming()
        except (OSError, JobCheckpointError) as error:
            self.system_panic(reason=f"cannot keep checkpoints in {directory}: {error}", fl_ctx=fl_ctx)
            return
        self._store = store
        job_context.set_persistor(fl_ctx, self)

    def _begin(self, fl_ctx: FLContext) -> LazyTensorDict:
        last = self.store.latest()
        if last is not None and self.checkpoint_dir is not None:
            try:
                tensors = open_checkpoint(last.path)
            except (OSError, FormatError) as error:
                raise JobCheckpointError(
                    f"{error}; restore the file from a backup, or remove {self.store.directory} to start over"
                ) from error
            self.resumed, self._meta = last, last.meta
            self.log_info(fl_ctx, f"Resuming from {last.path}, after round {last.round}", fire_event=False)
            return tensors
        source = self._source(fl_ctx)
        if source is not None:
            self.log_info(fl_ctx, f"Starting from the checkpoint {display(str(source))}", fire_event=False)
            return initial_model.from_checkpoint(source)
        return self._from_model(fl_ctx)

    def _keep_records(self, fl_ctx: FLContext) -> None:
        """Keep the records of the job with its checkpoints, for the job that resumes from them."""
        log = job_context.round_log_of(fl_ctx)
        if self.checkpoint_dir is not None and log is not None and log.writer is not None:
            log.writer.keep_copy(self.store.directory / FILE_NAME, continues=self.resumed is not None)

    def _complete_checkpoints(self, tensors: LazyTensorDict, fl_ctx: FLContext) -> None:
        """Use the initial Hugging Face directory of the job, or its copy if a resumed job does not find it."""
        paths = [path for path in (self._source(fl_ctx), self.resumed and self.store.directory) if path]
        found = next(filter(None, map(ModelDirectory.find, paths)), None)
        if found is None:
            return
        self.store.begin_with(found)
        excluded = re.compile(self.exclude_vars) if self.exclude_vars else None
        included = self._included(tensors)
        self._left_out = {name: entry.lazy() for name, entry in tensors.entries.items() if name not in included}
        names = model_names(found, tensors.entries)
        if names.missing or names.unexpected:
            self.log_warning(fl_ctx, _without_counterpart(names, found.path), fire_event=False)
        self.names = TensorNames(
            {name: stored for name, stored in names.stored.items() if not (excluded and excluded.search(name))},
            names.unused,
            is_adapter=found.is_adapter,
            exclude=excluded,
        )

    def _warn_of_settings(self, excludes: bool, fl_ctx: FLContext) -> None:
        """Log the arguments that have no effect in this job."""
        found = []
        if self.exclude_vars and not excludes:
            found.append(f"exclude_vars={quoted(self.exclude_vars)}, because no tensor has a matching name")
        if self.store.is_hugging_face:
            given = {"global_model_file_name": MODEL_NAME, "best_global_model_file_name": BEST_NAME}
            found += [
                f"{name}, because the job started from a Hugging Face directory, whose names its checkpoints have"
                for name, default in given.items()
                if getattr(self, name) != default
            ]
        for setting in found:
            self.log_warning(fl_ctx, f"Setting without effect: {setting}; remove or correct it", fire_event=False)

    def _from_model(self, fl_ctx: FLContext) -> LazyTensorDict:
        model: Any = fl_ctx.get_engine().get_component(self.model) if isinstance(self.model, str) else self.model
        if isinstance(model, dict):
            path = model.get("path") or model.get("class_path")
            if not path:
                raise InitialModelError(f"the model {model!r} has no 'path'; set it to the path of the class")
            return initial_model.from_class(path, model.get("args") or {}, self.store.incoming)
        if isinstance(model, torch.nn.Module):
            return initial_model.from_module(model, self.store.incoming)
        raise InitialModelError(f"no initial model: model is {self.model!r}, and source_ckpt_file_full_name is not set")

    def _source(self, fl_ctx: FLContext) -> Path | str | None:
        if not self.source_ckpt_file_full_name:
            return None
        if is_url(self.source_ckpt_file_full_name):
            return self.source_ckpt_file_full_name
        return Path(
            fl_ctx.get_prop(FLContextKey.APP_ROOT),
            WorkspaceConstants.CUSTOM_FOLDER_NAME,
            self.source_ckpt_file_full_name,
        )

    def _included(self, tensors: LazyTensorDict) -> dict[str, Any]:
        excluded = re.compile(self.exclude_vars) if self.exclude_vars else None
        return {name: entry for name, entry in tensors.entries.items() if not (excluded and excluded.search(name))}

    def _merged(self, ml: ModelLearnable) -> dict[str, Any]:
        wrong = validate_model_learnable(ml)
        if wrong:
            raise JobCheckpointError(f"cannot save the global model: {wrong}")
        weights = ml[ModelLearnableKey.WEIGHTS]
        if self.names is not None:
            # An aggregator that does not use acceptance keeps the names of clients.
            weights = {name: value for name, value in weights.items() if name not in self.names.further}
        if self._current:
            wrong = _find_mismatch(weights, self._current)
            if wrong:
                raise JobCheckpointError(f"cannot save the global model: {wrong}")
        self._meta = ml.get(ModelLearnableKey.META) or {}
        # Tensors that were not learned keep the value they had.
        self._current = {**self._current, **weights} if len(weights) < len(self._current) else dict(weights)
        if all(hasattr(value, "source") for value in self._current.values()):
            return self._current
        return {name: entry.lazy() for name, entry in entries_of(self._current).items()}

    def _save_best(self, fl_ctx: FLContext) -> None:
        ml = fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)
        weights = self._merged(ml) if ml else self._current
        path = self.store.save_best({**self._left_out, **weights})
        self.log_info(fl_ctx, f"Saved the best global model so far as {path}", fire_event=False)

    def _leave_models(self, fl_ctx: FLContext) -> None:
        app = Path(fl_ctx.get_prop(FLContextKey.APP_ROOT))
        try:
            models = leave_models(self.store, app, save_pytorch=self.save_pytorch, meta=self._meta)
        except (NVFlareLazyError, OSError) as error:
            self.log_warning(
                fl_ctx,
                f"The result of the job is incomplete, its models are in {self.store.directory}: {error}",
                fire_event=False,
            )
            return
        for artifact, path in models.items():
            self.log_info(fl_ctx, f"{artifact} is {path}", fire_event=False)


def _without_counterpart(names: ModelNames, path: Path) -> str:
    sides = [("needs", names.missing), ("does not have", names.unexpected)]
    found = " and ".join(f"{verb} {listed(each)}" for verb, each in sides if each)
    return (
        f"The model of transformers {names.version} {found}, unlike {path}. Clients that load strictly reject the "
        "initial model. If they do, start the job with a checkpoint of model.state_dict() instead"
    )


def _find_mismatch(weights: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """Describe how weights differ from a model in names and shapes, or return None. Tensors may be missing."""
    unexpected = [name for name in weights if name not in model]
    if not weights or unexpected:
        return f"unexpected tensor {listed(unexpected)}" if unexpected else "it has no tensors"
    for name, value in weights.items():
        if not is_weight(value):
            return f"{quoted(name)} must be a tensor or an array, got {type(value).__name__}"
        if tuple(value.shape) != tuple(model[name].shape):
            return f"{quoted(name)} has shape {list(value.shape)}, expected {list(model[name].shape)}"
    return None
