# SPDX-License-Identifier: Apache-2.0
"""An executor as they were written before the Client API: a Shareable with a DXO in, another one out."""

from __future__ import annotations

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import make_reply
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs


class AddingExecutor(Executor):
    """Adds the number of the site to each tensor, and 1 to counters, and sends the difference."""

    def __init__(self):
        super().__init__()
        # Without the Client API, a job does it itself.
        fobs.register(TensorDecomposer)

    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        if task_name != "train":
            return make_reply(ReturnCode.TASK_UNKNOWN)
        site = int(fl_ctx.get_identity_name().rsplit("-", 1)[-1])
        before = from_shareable(shareable).data
        self.log_info(fl_ctx, f"received {type(next(iter(before.values()))).__name__}")
        changes = {name: (value + (site if value.shape else 1)) - value for name, value in before.items()}
        dxo = DXO(DataKind.WEIGHT_DIFF, data=changes, meta={MetaKey.NUM_STEPS_CURRENT_ROUND: 4})
        return dxo.to_shareable()
