# SPDX-License-Identifier: Apache-2.0
"""`ModelOutput`: the path and the owner of a new model's file, among the checkpoints or in the job's scratch.

A file in the directory of the checkpoints becomes a checkpoint by a second name, without a copy. In both
places the file is removed with the last reference to its tensors.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare_lazy.flare import job_context
from nvflare_lazy.scratch import DownloadScratch
from nvflare_lazy.tensors.tensor_file import TemporaryPath
from nvflare_lazy.transport import offload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvflare.apis.fl_context import FLContext

    from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict


class ModelOutput:
    """A file to write a model to, and its owner, which removes the file with its last reference.

    Example:
        >>> output = ModelOutput.of(fl_ctx, results["site-1"])
        >>> model = output.finish(aggregation.run(results, output.path).tensors)
    """

    def __init__(self, path: Path, owner: TemporaryPath | DownloadScratch) -> None:
        self.path = path
        self._owner = owner

    @classmethod
    def of(cls, fl_ctx: FLContext | None, like: Mapping[str, Any]) -> ModelOutput:
        """Return an output beside the job's checkpoints, or in scratch if they are not ours.

        Scratch reserves the bytes of a model like `like`.
        """
        persistor = job_context.persistor_of(fl_ctx)
        if persistor is not None:
            return cls.within(persistor.store.incoming)
        nbytes = sum(int(value.nbytes) for value in like.values())
        download = offload.runtime.scratch.download("aggregate", reserve=nbytes)
        return cls(download.path / "model.safetensors", download)

    @classmethod
    def within(cls, directory: Path) -> ModelOutput:
        """Return an output of a new name in a directory."""
        path = directory / f"{secrets.token_hex(8)}.safetensors"
        return cls(path, TemporaryPath(path))

    def finish(self, model: LazyTensorDict) -> LazyTensorDict:
        """Hand the file over to the model that was written to it, and return the model."""
        if isinstance(self._owner, DownloadScratch):
            # It was not written through scratch, which therefore has not counted it yet.
            self._owner.adopt(self.path.name)
        model.own(self._owner)
        return model
