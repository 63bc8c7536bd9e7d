# SPDX-License-Identifier: Apache-2.0
"""`JobDemand`: the memory and the disk space that a job needs at least, before it has used them.

`TensorOffload` compares it with the limits of the container when the model is known.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nvflare.apis.fl_constant import FLContextKey, ProcessType

from nvflare_lazy.flare import job_context
from nvflare_lazy.scratch.container import find_shortages

if TYPE_CHECKING:
    from nvflare.apis.fl_context import FLContext

# NVFlare's persistor writes the last and the best model.
_STOCK_CHECKPOINTS = 2
# NVFlare's mean has a sum and, when it divides, the new model.
_MODELS_OF_STOCK_MEAN = 2


@dataclass(frozen=True)
class JobDemand:
    """The additional memory and disk space that a job needs.

    Attributes:
        memory: Bytes of memory.
        storage: Bytes of disk space below each directory.
        results: Results that the process receives in a round.
    """

    memory: int
    storage: dict[Path, int]
    results: int

    @classmethod
    def of(cls, fl_ctx: FLContext, model_bytes: int, memory_budget: int, scratch: Path) -> JobDemand:
        """Return the demand of the running job for a model of this size.

        It is a lower bound: components of other packages, and optimizer state, are not included.
        """
        memory = memory_budget
        if job_context.running_aggregation(fl_ctx).by_nvflare:
            memory += _MODELS_OF_STOCK_MEAN * model_bytes
        storage: dict[Path, int] = defaultdict(int)
        results = _number_of_results(fl_ctx)
        storage[scratch] += results * model_bytes
        persistor = job_context.persistor_of(fl_ctx)
        app = fl_ctx.get_prop(FLContextKey.APP_ROOT)
        if persistor is not None:
            storage[persistor.store.directory] += persistor.store.bytes_to_come(model_bytes)
        elif app is not None and fl_ctx.get_process_type() != ProcessType.CLIENT_JOB:
            storage[Path(app)] += _STOCK_CHECKPOINTS * model_bytes
        return cls(memory, dict(storage), results)

    def shortages(self) -> list[str]:
        """Return a sentence for each limit that is lower than the demand."""
        return find_shortages(self.memory, self.storage)


def _number_of_results(fl_ctx: FLContext) -> int:
    """Return how many results of a round this process receives at most."""
    if fl_ctx.get_process_type() == ProcessType.CLIENT_JOB:
        return max(1, len(job_context.trainers(fl_ctx)))
    clients: list[object] = getattr(fl_ctx.get_engine(), "get_clients", list)()
    return max(1, len(clients))
