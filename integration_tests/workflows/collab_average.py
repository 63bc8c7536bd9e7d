# SPDX-License-Identifier: Apache-2.0
"""Federated averaging as plain functions, with NVFlare's Collab API: the server calls the clients and aggregates."""

from __future__ import annotations

import torch
from nvflare.collab import collab

import nvflare_lazy


def initial_model():
    """The model of the first round."""
    return {"w": torch.arange(3000, dtype=torch.float32).reshape(3, 1000), "b": torch.ones(7)}


@collab.publish
def train(model, factor):
    """Train a model; the server passes tensors and gets tensors."""
    site = int(collab.site_name.rsplit("-", 1)[-1])
    print(f"{collab.site_name} received {type(model['w']).__name__}")
    return {name: value * factor + site for name, value in model.items()}


@collab.main
def run():
    """The server's part."""
    model = initial_model()
    path = collab.get_app_prop("path")
    for number in range(2):
        contributions = dict(collab.clients.train(model, 0.5))
        print(f"round {number}: server received {type(contributions['site-1']['w']).__name__}")
        model = dict(nvflare_lazy.aggregate(contributions, out=f"{path}/model-{number}.safetensors"))
