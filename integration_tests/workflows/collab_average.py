# SPDX-License-Identifier: Apache-2.0
"""Federated averaging as plain functions, with NVFlare's Collab API: the server calls the clients and aggregates."""

from __future__ import annotations

import torch
from nvflare.collab import collab

import nvflare_lazy


@collab.publish
def train(model, factor):
    """Train a model; the server passes tensors and gets tensors."""
    site = int(collab.site_name.rsplit("-", 1)[-1])
    print(f"{collab.site_name} received {type(model['w']).__name__}")
    return {name: value * factor + site for name, value in model.items()}


@collab.main
def run():
    """The server's part."""
    model = {"w": torch.arange(3000, dtype=torch.float32).reshape(3, 1000), "b": torch.ones(7)}
    path = collab.get_app_prop("path")
    for number in range(2):
        contributions = dict(collab.clients.train(model, 0.5))
        print(f"round {number}: server received {type(contributions['site-1']['w']).__name__}")
        if path:
            model = dict(nvflare_lazy.aggregate(contributions, out=f"{path}/model-{number}.safetensors"))
        else:
            results = contributions.values()
            model = {name: sum(result[name] for result in results) / len(results) for name in model}
    torch.save({name: value.clone() for name, value in model.items()}, collab.get_app_prop("result"))
    return None
