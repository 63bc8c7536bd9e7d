# SPDX-License-Identifier: Apache-2.0
"""The step from one global model to the next: differences added, or an optimizer's step, in a stream.

The last thing that happens to a round before it is saved. Aggregation knows the optimizers; here is which of them a job
asks for, with which step in which round, and where its state is.
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

from nvflare_lazy.aggregation.server_optimizers import ServerOptimizer, apply_difference, to_optimizer
from nvflare_lazy.flare import job_context
from nvflare_lazy.flare.model_output import ModelOutput
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.scratch import DownloadScratch, current_job_scratch

if TYPE_CHECKING:
    from nvflare.apis.fl_context import FLContext

    from nvflare_lazy.aggregation import ParamsType
    from nvflare_lazy.tensors.entry import TensorEntry

#: Statistics of normalization layers, which are no parameters: NVFlare's FedOpt averages them, too.
STATISTICS = r"(running_mean|running_var|num_batches_tracked)$"


class ModelUpdate:
    """Takes the step.

    Args:
        optimizer: None to add differences as they are; else the optimizer's "name" and parameters as
            `nvflare_lazy.aggregation.server_optimizers` has them, and as further keys:

            - "lr_scheduler": `{"path": "torch.optim.lr_scheduler...", "args": {...}}`, which sets the step of a round
            - "averaged": regular expression of tensors that are averaged instead; statistics of normalization layers

    Example:
        >>> ModelUpdate({"name": "fedadam", "lr": 0.01})
    """

    def __init__(self, optimizer: Mapping[str, Any] | None) -> None:
        settings = dict(optimizer or {})
        self._schedule: Mapping[str, Any] | None = settings.pop("lr_scheduler", None)
        # How NVFlare tells a dictionary from a component.
        settings.pop("config_type", None)
        self._averaged = re.compile(settings.pop("averaged", STATISTICS))
        self._optimizer: ServerOptimizer | None = None if optimizer is None else to_optimizer(settings)
        self._scratch: DownloadScratch | None = None
        if self._optimizer is not None:
            self._for_round(0)

    @property
    def optimizes(self) -> bool:
        """Whether there is an optimizer."""
        return self._optimizer is not None

    def take(
        self,
        base: Mapping[str, Any],
        aggregate: LazyTensorDict,
        kind: ParamsType,
        fl_ctx: FLContext | None,
        round_number: int | None,
        *,
        memory_budget: int | str,
    ) -> LazyTensorDict:
        """Return the next global model, in a file of its own.

        Args:
            base: The global model.
            aggregate: What the round came to.
            kind: Whether that is a model or a difference from one.
            fl_ctx: NVFlare's context of the job.
            round_number: The round.
            memory_budget: Memory to work in.
        """
        if self._optimizer is None:
            output = ModelOutput.of(fl_ctx, sum(int(value.nbytes) for value in base.values()))
            moved = apply_difference(base, aggregate, output.path, memory_budget=memory_budget, fsync=False)
            return output.finish(moved)
        averaged = {name for name in base if self._averaged.search(name)}
        optimizer = self._for_round(round_number or 0)
        entries: dict[str, TensorEntry] = {}
        for names, stepper in ((base.keys() - averaged, optimizer), (averaged, replace_by_mean())):
            if not names:
                continue
            part = {name: value for name, value in base.items() if name in names}
            update = {name: entry for name, entry in aggregate.entries.items() if name in names}
            output = ModelOutput.of(fl_ctx, sum(int(value.nbytes) for value in part.values()))
            taken = stepper.step(
                part,
                LazyTensorDict.from_entries(update),
                output.path,
                state_dir=self._state_dir(fl_ctx) if stepper.slots else None,
                params_type=kind,
                on_unknown_model="restart",
                memory_budget=memory_budget,
                fsync=False,
            )
            output.finish(taken)
            self._count_states()
            if len(names) == len(base):
                return taken
            entries.update(taken.entries)
        return LazyTensorDict.from_entries(entries)

    def _state_dir(self, fl_ctx: FLContext | None) -> Path:
        persistor = job_context.persistor_of(fl_ctx)
        if persistor is not None:
            return persistor.store.directory / "optimizer"
        if self._scratch is None:
            self._scratch = current_job_scratch().download("optimizer")
        return self._scratch.path

    def _count_states(self) -> None:
        """Count the state files that are in scratch: they are not written through it."""
        if self._scratch is not None:
            for name in os.listdir(self._scratch.path):
                self._scratch.adopt(name)

    def _for_round(self, number: int) -> ServerOptimizer:
        assert self._optimizer is not None
        if self._schedule is None:
            return self._optimizer
        parameter = torch.nn.Parameter(torch.zeros(1))
        ruler = torch.optim.SGD([parameter], lr=self._optimizer.lr)
        path = self._schedule.get("path") or self._schedule["class_path"]
        scheduler = instantiate_class(path, {**(self._schedule.get("args") or {}), "optimizer": ruler})
        for _ in range(number):
            ruler.step()
            scheduler.step()
        # A schedule may end at zero, which is no step an optimizer takes.
        return replace(self._optimizer, lr=max(float(ruler.param_groups[0]["lr"]), sys.float_info.min))


def replace_by_mean() -> ServerOptimizer:
    """Return the optimizer that takes the mean as it is."""
    return to_optimizer({"name": "fedavgm", "lr": 1.0, "momentum": 0.0})
