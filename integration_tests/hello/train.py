# SPDX-License-Identifier: Apache-2.0
"""A client that really learns, with NVFlare's Client API as always; with SCAFFOLD, FedCE or poison, if asked for."""

from __future__ import annotations

import argparse

import nvflare.client as flare
import torch
from net import Net, data
from nvflare.app_common.app_constant import AlgorithmConstants
from nvflare.app_opt.pt.fedce import PTFedCEHelper
from nvflare.app_opt.pt.scaffold import PTScaffoldHelper, get_lr_values


def accuracy(model: Net) -> float:
    model.eval()
    x, y = data(999)
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--scaffold", action="store_true")
    parser.add_argument("--fedce", action="store_true")
    parser.add_argument("--poison", default="", help="the site that sends nonsense")
    options = parser.parse_args()
    flare.init()
    site = flare.get_site_name()
    x, y = data(int(site.rsplit("-", 1)[-1]))
    model, helper = Net(options.hidden), PTScaffoldHelper()
    sent = None
    if options.scaffold:
        helper.init(model)
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        types = {type(value).__name__ for value in (received.params or {}).values()}
        print(f"{site} received {', '.join(sorted(types))}")
        if flare.is_submit_model():
            flare.send(flare.FLModel(params=model.state_dict()))
            continue
        model.load_state_dict(received.params)
        metrics = {"accuracy": accuracy(model)}
        if flare.is_evaluate():
            flare.send(flare.FLModel(metrics=metrics))
            continue
        before = Net(options.hidden)
        before.load_state_dict(received.params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        meta = {"NUM_STEPS_CURRENT_ROUND": 8}
        if options.scaffold:
            helper.load_global_controls(received.meta[AlgorithmConstants.SCAFFOLD_CTRL_GLOBAL])
            controls = helper.get_params()
        model.train()
        for batch in range(8):
            part = slice(batch * 64, batch * 64 + 64)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
            if options.scaffold:
                helper.model_update(model, get_lr_values(optimizer)[0], *controls)
        if options.scaffold:
            helper.terms_update(model, get_lr_values(optimizer)[0], *controls, before)
            meta[AlgorithmConstants.SCAFFOLD_CTRL_DIFF] = helper.get_delta_controls()
        params = model.state_dict()
        if site == options.poison:
            params = {name: torch.full_like(value, 1000) for name, value in params.items()}
        result = flare.FLModel(params=params, metrics=metrics, meta=meta)
        if options.fedce:
            weight = PTFedCEHelper.get_contribution_weight(received, site)
            minus = PTFedCEHelper.make_minus_model(before, sent or {}, weight)
            PTFedCEHelper.set_minus_model_score(result, accuracy(minus))
            sent = {name: value.clone() for name, value in params.items()}
        flare.send(result)


if __name__ == "__main__":
    main()
