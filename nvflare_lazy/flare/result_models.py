# SPDX-License-Identifier: Apache-2.0
"""`leave_models()`: the models in a job's result, each once, and the manifest by which NVFlare's download finds them.

`LazyModelPersistor` calls it at the end of a job. NVFlare then archives the run directory, and an archive has one copy
for each name of a file.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

from nvflare_lazy._text import format_size
from nvflare_lazy.errors import DiskFullError
from nvflare_lazy.flare.checkpoint_store import existing_checkpoint
from nvflare_lazy.flare.pytorch_file import write_pytorch_file
from nvflare_lazy.formats import open as open_checkpoint
from nvflare_lazy.formats import save
from nvflare_lazy.formats.atomic_file import AtomicFile
from nvflare_lazy.formats.save_checkpoint import link_checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from nvflare_lazy.flare.checkpoint_store import CheckpointStore
    from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict

MANIFEST_NAME = "artifact_manifest.json"
_MANIFEST_VERSION = "1"
# The first name is NVFlare's.
_GLOBAL, _BEST, _ROUND = "global_model", "best_global_model", "round_"


def leave_models(store: CheckpointStore, app: Path, *, save_pytorch: bool, meta: Mapping[str, Any]) -> dict[str, Path]:
    """Leave each model once in the app's folder, and write the manifest next to that folder.

    If the checkpoints are elsewhere, they stay there, and the last and the best model also get a name in the app's
    folder, or a copy if it is on another file system.

    Args:
        store: The checkpoints.
        app: The app's folder in the run directory.
        save_pytorch: Whether the last and the best model become PyTorch files.
        meta: What NVFlare keeps with the model, for PyTorch files.

    Returns:
        The file of each model, or the index of its shards, by the names in the manifest. It has an entry for each
        model that the job has saved, and entries of the same model have the same path.

    Raises:
        DiskFullError: There is no space for a copy or a PyTorch file. The safetensors files are unchanged.
    """
    is_elsewhere = store.directory.resolve() != app.resolve()
    found = {_GLOBAL: existing_checkpoint(store.model_path), _BEST: existing_checkpoint(store.best_path)}
    if not is_elsewhere:
        found |= {f"{_ROUND}{number}": path for number, path in store.rounds().items()}
    left: dict[frozenset[tuple[int, int]], Path] = {}
    models = {}
    for name, path in found.items():
        if path is None:
            continue
        tensors = open_checkpoint(path)
        identity = _identity(tensors)
        if identity not in left:
            left[identity] = _bring(store, tensors, app, name) if is_elsewhere else path
        elif not is_elsewhere:
            _remove(path, tensors, app)
        models[name] = left[identity]
    if not is_elsewhere:
        store.clear_state()
    if models:
        _write_manifest(models, app.parent)
    if models and save_pytorch:
        # If the disk is too small for this, the manifest has the safetensors files.
        models = _as_pytorch(store, models, app, meta)
        _write_manifest(models, app.parent)
    return models


def _identity(tensors: LazyTensorDict) -> frozenset[tuple[int, int]]:
    """Return the identity of a model's files, which is the same for all their names."""
    found = set()
    for file in tensors.local_files():
        with file.descriptor() as fd:
            status = os.fstat(fd)
        found.add((status.st_dev, status.st_ino))
    return frozenset(found)


def _bring(store: CheckpointStore, tensors: LazyTensorDict, app: Path, name: str) -> Path:
    """Give a model of another directory a name in the app's folder, or copy it."""
    target = app / (store.model_path if name == _GLOBAL else store.best_path).relative_to(store.directory)
    target.parent.mkdir(exist_ok=True)
    store.copy_companions(target.parent)
    if not link_checkpoint(tensors.local_files(), target, fsync=False):
        free = shutil.disk_usage(app).free
        if free < tensors.nbytes:
            raise DiskFullError(f"{app} has {format_size(free)} free, a copy takes {format_size(tensors.nbytes)}")
        save(tensors, target, max_shard_size=store.max_shard_size)
    brought = existing_checkpoint(target)
    assert brought is not None
    return brought


def _remove(path: Path, tensors: LazyTensorDict, app: Path) -> None:
    """Remove one name of a model."""
    if path.parent.resolve() != app.resolve():
        shutil.rmtree(path.parent)
        return
    for name in {str(path), *(file.path for file in tensors.files())}:
        os.unlink(name)


def _as_pytorch(
    store: CheckpointStore, models: Mapping[str, Path], app: Path, meta: Mapping[str, Any]
) -> dict[str, Path]:
    """Replace the last and the best model by PyTorch files. Hugging Face directories stay."""
    written: dict[Path, Path] = {}
    for artifact, name in ((_GLOBAL, store.model_name), (_BEST, store.best_name)):
        path = models.get(artifact)
        if path is None or path in written:
            continue
        tensors = open_checkpoint(path)
        written[path] = (app / name).with_suffix(".pt")
        write_pytorch_file(tensors, written[path], meta=meta)
        if not store.is_hugging_face:
            _remove(path, tensors, app)
    if store.is_hugging_face:
        return dict(models)
    return {artifact: written.get(path, path) for artifact, path in models.items()}


def _write_manifest(models: Mapping[str, Path], run: Path) -> None:
    artifacts = {name: path.relative_to(run).as_posix() for name, path in models.items()}
    manifest = {"schema_version": _MANIFEST_VERSION, "artifacts": artifacts}
    with AtomicFile(run / MANIFEST_NAME) as file:
        file.write_at((json.dumps(manifest, indent=2) + "\n").encode(), 0)
        file.sync()
        file.publish()
