# SPDX-License-Identifier: Apache-2.0
"""`ModelOutput`: the path and the owner of a new model's files, among the checkpoints or in the job's scratch.

Files in the directory of the checkpoints become a checkpoint by a second name, without a copy. In both
places the files are removed with the last reference to their tensors.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvflare_lazy.flare import job_context
from nvflare_lazy.formats.hugging_face.model_directory import WEIGHTS_NAME
from nvflare_lazy.scratch import DownloadScratch
from nvflare_lazy.tensors.tensor_file import TemporaryPath
from nvflare_lazy.transport import offload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvflare.apis.fl_context import FLContext

    from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict


class ModelOutput:
    """A file, or its shards, to write a model to, and their owner, which removes them with its last reference.

    Example:
        >>> output = ModelOutput.of(fl_ctx, results["site-1"])
        >>> model = output.finish(aggregation.run(results, output.path).tensors)
    """

    def __init__(
        self, directory: Path, owner: TemporaryPath | DownloadScratch, max_shard_size: int | None = None
    ) -> None:
        self.path = directory / WEIGHTS_NAME
        #: A larger model is written in several files.
        self.max_shard_size = max_shard_size
        self._owner = owner

    @classmethod
    def of(cls, fl_ctx: FLContext | None, like: Mapping[str, Any]) -> ModelOutput:
        """Return an output in the directory of the job's checkpoints, or in scratch if they are not ours.

        Scratch reserves the bytes of a model like `like`.
        """
        persistor = job_context.persistor_of(fl_ctx)
        if persistor is not None:
            return cls.within(persistor.store.incoming, persistor.store.max_shard_size)
        nbytes = sum(int(value.nbytes) for value in like.values())
        download = offload.runtime.scratch.download("aggregate", reserve=nbytes)
        return cls(download.path, download)

    @classmethod
    def within(cls, directory: Path, max_shard_size: int | None = None) -> ModelOutput:
        """Return an output in a new directory below a directory."""
        path = directory / secrets.token_hex(8)
        path.mkdir(mode=0o700)
        return cls(path, TemporaryPath(path), max_shard_size)

    def finish(self, model: LazyTensorDict) -> LazyTensorDict:
        """Hand the files over to the model that was written to them, and return the model."""
        if isinstance(self._owner, DownloadScratch):
            # It was not written through scratch, which therefore has not counted it yet.
            self._owner.adopt(self.path.name)
        for file in model.local_files():
            file.shareable = True
        model.own(self._owner)
        return model
