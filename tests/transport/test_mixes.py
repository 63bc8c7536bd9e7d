# SPDX-License-Identifier: Apache-2.0
"""Every mix of stock and plugin peers, of tensors and arrays, of memory and disk: payloads arrive unchanged."""

from __future__ import annotations

import pytest
import safetensors.torch

from tests.transport import scenes
from tests.transport.peers import Net


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    with Net(str(tmp_path_factory.mktemp("scratch")), server=True, site_1=True, site_2=False) as net:
        yield net


@pytest.fixture(params=["one", "ten", "many", "dtypes", "odd"])
def kind(request):
    return request.param


@pytest.fixture(params=["torch", "numpy"])
def backend(request):
    return request.param


def exchange(net, sender, receiver, backend, kind, lazy=False):
    """Send a payload and return the differences on arrival."""
    code = net[sender].call(scenes.send, net[receiver].fqcn, backend, kind)
    assert code == "ok"
    wrong = net[receiver].call(scenes.compare, backend, kind, lazy)
    net[receiver].call(scenes.forget)
    return wrong


@pytest.mark.parametrize("sender", ["site_1", "site_2"], ids=["plugin", "stock"])
@pytest.mark.parametrize("to_disk", [False, True], ids=["to memory", "to disk"])
def test_to_plugin(net, sender, backend, kind, to_disk):
    """A receiver with the plugin gets the same values from both kinds of sender, in memory and on disk."""
    if sender == "site_2" and kind == "odd":
        kind = "odd for stock"
    net["server"].call(scenes.offload, to_disk)
    assert exchange(net, sender, "server", backend, kind, lazy=to_disk) == []
    assert net["server"].call(scenes.scratch_files) == []


@pytest.mark.parametrize("to_disk", [False, True], ids=["to memory", "to disk"])
def test_rare_types(net, to_disk):
    """Two peers with the plugin also exchange types that NVFlare, or the file format, does not support."""
    net["server"].call(scenes.offload, to_disk)
    assert exchange(net, "site_1", "server", "torch", "rare", lazy=to_disk) == []
    assert len(scenes.tensors("rare")) >= 2  # the newest of them are not in every release of torch


def test_to_stock(net, backend, kind):
    """A stock receiver gets the same values from a sender with the plugin."""
    assert exchange(net, "server", "site_2", backend, kind) == []


@pytest.mark.parametrize("sender", ["site_1", "site_2"], ids=["plugin", "stock"])
def test_progress(net, sender):
    """The last event has the totals of the whole payload: in segments, and as whole tensors with their headers.

    The list of running downloads has the received bytes so far, and the total if the sender states it.
    """
    tensors = scenes.tensors("ten")
    reference = net[sender].call(scenes.offer_tensors, "ten")
    last = net["server"].call(scenes.download_with_progress, net[sender].fqcn, reference)
    assert (last["state"], last["items_done"]) == ("completed", len(tensors))
    stock = [len(safetensors.torch.save({name: tensor})) for name, tensor in tensors.items()]
    total = sum(stock if sender == "site_2" else (tensor.nbytes for tensor in tensors.values()))
    assert last["bytes_done"] == total
    assert {source for source, _, _ in last["listed"]} == {net[sender].fqcn}
    received = [received for _, received, _ in last["listed"]]
    assert (min(received), max(received)) == (0, total)
    assert sender == "site_1" or len(set(received)) > 3
    assert {total for _, received, total in last["listed"] if received} == {None if sender == "site_2" else total}


def test_end_of_a_workflow(net):
    """NVFlare's cleanup ends a download in progress that NVFlare would have written below the workflow's directory."""
    server = net["server"]
    server.call(scenes.offload, True)
    server.call(scenes.begin_workflow)
    server.call(scenes.slow_down, 0.5)
    net["site_1"].start(scenes.send, "server", "torch", "ten")
    server.call(scenes.end_downloads_as_nvflare_does)
    assert net["site_1"].result() == "ok"
    server.call(scenes.slow_down, 0.0)
    assert server.call(scenes.failure) == "TransferAbortedError"
    assert server.call(scenes.scratch_files) == []
    server.call(scenes.forget)
    server.call(scenes.offload, False)
