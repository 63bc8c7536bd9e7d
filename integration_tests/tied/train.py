# SPDX-License-Identifier: Apache-2.0
"""Trains a model with tied embeddings: plain, with SCAFFOLD, or with FedProx if the server sends its coefficient."""

from __future__ import annotations

import copy
import sys

import nvflare.client as flare
import torch
from net import Net
from nvflare.app_common.app_constant import AlgorithmConstants
from nvflare.app_opt.pt.fedproxloss import PTFedProxLoss
from nvflare.app_opt.pt.scaffold import PTScaffoldHelper, get_lr_values


def main() -> None:
    flare.init()
    model, helper = Net(), PTScaffoldHelper()
    scaffold = "--scaffold" in sys.argv
    if scaffold:
        helper.init(model)
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        # Strict: every name of the model must arrive.
        model.load_state_dict(received.params)
        before = copy.deepcopy(model)
        mu = received.meta.get(AlgorithmConstants.FEDPROX_MU)
        assert (mu is not None) == ("--fedprox" in sys.argv)
        if scaffold:
            helper.load_global_controls(received.meta[AlgorithmConstants.SCAFFOLD_CTRL_GLOBAL])
            controls = helper.get_params()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(4):
            optimizer.zero_grad()
            (model.loss() + (PTFedProxLoss(mu)(model, before) if mu else 0)).backward()
            optimizer.step()
            if scaffold:
                helper.model_update(model, get_lr_values(optimizer)[0], *controls)
        meta = {"NUM_STEPS_CURRENT_ROUND": 4}
        if scaffold:
            helper.terms_update(model, get_lr_values(optimizer)[0], *controls, before)
            meta[AlgorithmConstants.SCAFFOLD_CTRL_DIFF] = helper.get_delta_controls()
        flare.send(flare.FLModel(params=model.state_dict(), meta=meta))


if __name__ == "__main__":
    main()
