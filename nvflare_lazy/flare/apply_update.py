# SPDX-License-Identifier: Apache-2.0
"""`ModelUpdate`: computes the next global model from the aggregate, by addition or with a server optimizer.

`LazyAggregator` and `LazyScaffold` use it as the last step of a round. `aggregation.server_optimizers` has the
optimizers; this module chooses the one that a job configures, its learning rate in each round, and where its state is.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nvflare.fuel.utils.class_utils import instantiate_class

from nvflare_lazy.aggregation.server_optimizers import FedAvgM, ServerOptimizer, to_optimizer
from nvflare_lazy.flare import job_context
from nvflare_lazy.flare.model_output import ModelOutput
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.scratch import DownloadScratch
from nvflare_lazy.transport import offload

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvflare.apis.fl_context import FLContext

    from nvflare_lazy.aggregation import ParamsType, Progress
    from nvflare_lazy.tensors.entry import TensorEntry

#: Statistics of normalization layers, which are not parameters; NVFlare's FedOpt also averages them.
STATISTICS = r"(running_mean|running_var|num_batches_tracked)$"
# Adds differences, and takes over a mean; without state.
_TAKE_THE_MEAN = FedAvgM(lr=1.0, momentum=0.0)


class ModelUpdate:
    """Computes the next global model.

    Args:
        optimizer: None to add differences without an optimizer; otherwise the "name" and parameters of an optimizer in
            `nvflare_lazy.aggregation.server_optimizers`, and optionally:

            - "lr_scheduler": `{"path": "torch.optim.lr_scheduler...", "args": {...}}`, the learning rate of each round
            - "averaged": regular expression of tensors that are averaged instead. Default: statistics of normalization
              layers.

    Example:
        >>> ModelUpdate({"name": "fedadam", "lr": 0.01})
    """

    def __init__(self, optimizer: Mapping[str, Any] | None) -> None:
        settings = dict(optimizer or {})
        self._schedule: Mapping[str, Any] | None = settings.pop("lr_scheduler", None)
        # NVFlare's marker that this dictionary is not a component.
        settings.pop("config_type", None)
        self._averaged = re.compile(settings.pop("averaged", STATISTICS))
        self._optimizer = _TAKE_THE_MEAN if optimizer is None else to_optimizer(settings)
        self._scratch: DownloadScratch | None = None
        self._for_round(0)

    def apply(
        self,
        base: Mapping[str, Any],
        aggregate: LazyTensorDict,
        kind: ParamsType,
        fl_ctx: FLContext | None,
        round_number: int | None,
        *,
        memory_budget: int | str,
        progress: Callable[[Progress], object] | None = None,
    ) -> LazyTensorDict:
        """Write the next global model to its own file and return it.

        Args:
            base: The global model.
            aggregate: The aggregate of the round.
            kind: Whether the aggregate is a model or a difference from one.
            fl_ctx: NVFlare's context of the job.
            round_number: The round.
            memory_budget: Memory to work in.
            progress: Called with the progress from time to time.
        """
        optimizer = self._for_round(round_number or 0)
        averaged = {
            name for name in {*base, *aggregate} if optimizer is not _TAKE_THE_MEAN and self._averaged.search(name)
        }
        entries: dict[str, TensorEntry] = {}
        for is_mean in (False, True) if averaged else (False,):
            stepper = _TAKE_THE_MEAN if is_mean else optimizer
            part = {name: value for name, value in base.items() if (name in averaged) == is_mean}
            update = {name: entry for name, entry in aggregate.entries.items() if (name in averaged) == is_mean}
            output = ModelOutput.of(fl_ctx, part)
            updated = stepper.step(
                part,
                LazyTensorDict.from_entries(update),
                output.path,
                state_dir=self._state_dir(fl_ctx) if stepper.slots else None,
                params_type=kind,
                on_unknown_model="restart",
                memory_budget=memory_budget,
                metadata=aggregate.metadata,
                max_shard_size=output.max_shard_size,
                fsync=False,
                progress=progress,
            )
            output.finish(updated)
            self._count_states()
            if not averaged:
                return updated
            entries.update(updated.entries)
        return LazyTensorDict.from_entries(entries)

    def _state_dir(self, fl_ctx: FLContext | None) -> Path:
        persistor = job_context.persistor_of(fl_ctx)
        if persistor is not None:
            return persistor.store.optimizer
        if self._scratch is None:
            self._scratch = offload.runtime.scratch.download("optimizer")
        return self._scratch.path

    def _count_states(self) -> None:
        """Count the state files in scratch against its quota: they are written directly."""
        if self._scratch is not None:
            for name in os.listdir(self._scratch.path):
                self._scratch.adopt(name)

    def _for_round(self, number: int) -> ServerOptimizer:
        if self._schedule is None:
            return self._optimizer
        parameter = torch.nn.Parameter(torch.zeros(1))
        reference_optimizer = torch.optim.SGD([parameter], lr=self._optimizer.lr)
        path = self._schedule.get("path") or self._schedule["class_path"]
        scheduler = instantiate_class(path, {**(self._schedule.get("args") or {}), "optimizer": reference_optimizer})
        for _ in range(number):
            reference_optimizer.step()
            scheduler.step()
        # A schedule may end at zero, which optimizers reject.
        return replace(self._optimizer, lr=max(float(reference_optimizer.param_groups[0]["lr"]), sys.float_info.min))
