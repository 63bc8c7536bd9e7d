# SPDX-License-Identifier: Apache-2.0
"""What every recipe of ours takes beyond NVFlare's arguments, and what that puts into a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nvflare.recipe.utils import prepare_initial_ckpt

from nvflare_lazy.flare.lazy_model_persistor import LazyModelPersistor
from nvflare_lazy.flare.tensor_offload import DEFAULT_MEMORY_BUDGET, TensorOffload
from nvflare_lazy.recipes.model_config import class_of, source_file_of

OFFLOAD_ID = "offload"
PACKAGE = "nvflare_lazy"


@dataclass(frozen=True)
class OffloadOptions:
    """Where and within what a job's models are kept.

    | argument         | meaning                                                                          |
    |------------------|----------------------------------------------------------------------------------|
    | `checkpoint`     | what to begin with: a checkpoint on the server, or a file here by relative path  |
    | `checkpoint_dir` | an absolute path on the server where checkpoints outlive the job and are gone on from |
    | `keep`           | rounds to keep there, besides the best model                                     |
    | `pytorch_file`   | also write the last and the best model as PyTorch files, as NVFlare does          |
    | `scratch_dir`    | the disk for what is received (on the server and on the clients)                 |
    | `scratch_quota`  | the most it may take there                                                       |
    | `memory_budget`  | memory for receiving and combining                                               |
    | `lazy_clients`   | whether the clients use this package, too; False if it is not installed there    |
    """

    checkpoint: str | None = None
    checkpoint_dir: str | None = None
    keep: int = 2
    pytorch_file: bool = False
    scratch_dir: str | None = None
    scratch_quota: int | str | None = None
    memory_budget: int | str = DEFAULT_MEMORY_BUDGET
    lazy_clients: bool = True

    def offload(self) -> TensorOffload:
        """Return the component for the server or a client."""
        return TensorOffload(scratch_dir=self.scratch_dir, quota=self.scratch_quota, memory_budget=self.memory_budget)

    def add_persistor(self, job: Any, model: Any, initial_ckpt: str | None, *, numpy: bool, best_name: str) -> str:
        """Add the persistor to a job and return its id.

        Args:
            job: The job.
            model: A module, a model's configuration, or None.
            initial_ckpt: A checkpoint as NVFlare's recipes take it; not looked at if there is `checkpoint`.
            numpy: Whether arrays are exchanged.
            best_name: File of the best model.
        """
        source = source_file_of(model)
        if source is not None:
            job.to_server(source)
        persistor = LazyModelPersistor(
            model=class_of(model),
            # A relative path is a file of this machine: it travels with the job.
            source_ckpt_file_full_name=prepare_initial_ckpt(self.checkpoint or initial_ckpt, job),
            allow_numpy_conversion=numpy,
            best_global_model_file_name=best_name,
            checkpoint_dir=self.checkpoint_dir,
            keep=self.keep,
            pytorch_file=self.pytorch_file,
        )
        added: str = job.to_server(persistor, id="persistor")
        return added

    def add_offload(self, job: Any) -> None:
        """Add the offload component to the server's and, if they are to have it, to the clients' configuration."""
        # Otherwise the sources of the package would be copied into the job.
        job.set_app_packages([PACKAGE])
        job.to_server(self.offload(), id=OFFLOAD_ID)
