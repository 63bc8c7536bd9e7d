# SPDX-License-Identifier: Apache-2.0
"""A client job takes what its trainer sends as files, and then the tasks; else references pass through it, as ever."""

from __future__ import annotations

import pytest

from tests.transport import scenes
from tests.transport.handoff import hop_scenes
from tests.transport.peers import Net

JOB = "site_1"
TRAINER = "site_1__trainer"


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    """The server and one of the trainers have another scratch root."""
    roots = [str(tmp_path_factory.mktemp(name)) for name in ("elsewhere", "scratch")]
    with Net(roots[0], handoff=True, server=True) as net:
        net.scratch_root = roots[1]
        for name, plugin in {"site_2": True, "site_1": True, "site_1__trainer": True, "site_1__stock": False}.items():
            net.add(name, plugin)
        net.scratch_root = roots[0]
        net.add("site_1__elsewhere", True)
        net.scratch_root = roots[1]
        yield net


@pytest.fixture(autouse=True)
def hop(net):
    """The job's component has enabled it; no result is known yet."""
    net[JOB].call(hop_scenes.enable)
    yield net[JOB]
    for peer in net.peers.values():
        peer.call(scenes.forget)


def send(net, sender, to, kind="ten", backend="torch", **kwargs):
    assert net[sender].call(scenes.send, net[to].fqcn, backend, kind, pass_through=True, **kwargs) == "ok"


def forward(net, to, kind="ten", backend="torch", *, lazy=False):
    assert net[JOB].call(scenes.forward, net[to].fqcn) == "ok"
    assert net[to].call(scenes.compare, backend, kind, lazy) == []


@pytest.mark.parametrize(("kind", "backend"), [("ten", "torch"), ("odd", "numpy")], ids=["as files", "too small"])
def test_result(net, hop, backend, kind):
    """It is in the scratch of the client job when the message arrives; the trainer may be gone then."""
    name = f"site_1__{backend}{kind}"  # NVFlare gives each trainer a different name
    trainer = net.add(name, True)
    trainer.wait_until_up()
    send(net, name, JOB, kind, backend)
    net.peers.pop(name).kill()
    assert hop.call(scenes.kinds_received) == {"LazyTensor" if backend == "torch" else "LazyArray"}
    forward(net, "server", kind, backend)


def test_lost_on_the_way(net, hop):
    """The result is sent again from the client job's scratch."""
    send(net, TRAINER, JOB)
    for _ in range(2):
        forward(net, "server")
        forward(net, "site_2")


def test_tasks_follow(net, hop):
    """The first task is passed on as references; after a result arrived as files, the client job takes the next one."""
    send(net, "server", JOB)
    assert hop.call(scenes.kinds_received) == {"LazyDownloadRef"}
    forward(net, TRAINER)
    send(net, TRAINER, JOB)
    hop.call(scenes.forget)
    send(net, "server", JOB)
    assert hop.call(scenes.kinds_received) == {"LazyTensor"}
    forward(net, TRAINER)
    hop.call(scenes.forget)
    send(net, "site_2", JOB)
    assert hop.call(scenes.kinds_received) == {"LazyDownloadRef"}  # not from the server: as in swarm learning


def test_server_on_the_same_host(net, hop):
    """With the same scratch root, server and trainer take each other's files, and references pass through again."""
    net["server"].call(hop_scenes.use_root, net.scratch_root)
    send(net, TRAINER, JOB)
    for source, end in (("server", TRAINER), (TRAINER, "server")):
        hop.call(scenes.forget)
        send(net, source, JOB)
        assert hop.call(scenes.kinds_received) == {"LazyDownloadRef"}
        forward(net, end, lazy=end == "server")
    net["server"].call(hop_scenes.end)


@pytest.mark.parametrize("trainer", ["site_1__stock", "site_1__elsewhere"])
def test_trainers_that_hand_nothing_over(net, hop, trainer):
    """Without the package, or with another scratch root: references, and the trainer serves its result to the server.

    The client job also takes no more tasks. It warns of a trainer without the package.
    """
    send(net, TRAINER, JOB)
    hop.call(scenes.forget)
    assert not hop.call(hop_scenes.warned_of_trainer)
    send(net, trainer, JOB)
    assert hop.call(hop_scenes.warned_of_trainer) == (trainer == "site_1__stock")
    assert hop.call(scenes.kinds_received) == {"LazyDownloadRef"}
    forward(net, "server")
    hop.call(scenes.forget)
    send(net, "server", JOB)
    assert hop.call(scenes.kinds_received) == {"LazyDownloadRef"}


@pytest.mark.parametrize("change", ["disabled", "quota", "handoff off", "in memory"])
def test_client_jobs_that_take_nothing(net, hop, change):
    """References as before: if the component requests it, if scratch is full, or without scratch or handoff."""
    hop.call(hop_scenes.change, change)
    send(net, TRAINER, JOB)
    assert hop.call(scenes.kinds_received) == {"LazyDownloadRef"}
    forward(net, "server")


@pytest.mark.parametrize("receivers", [["server"], ["server", "site-2"]])
def test_trainer_settles_when_its_client_job_has_the_result(net, hop, receivers):
    """Other receivers, by the name of a cell, in swarm learning; it was sent before `send` returns."""
    assert net[TRAINER].call(hop_scenes.send_and_wait, "site-1", receivers) == ["completed"]
    forward(net, "server")


def test_only_its_own_client_job_settles_it(net):
    """Another receiver may say that it passes a payload on; it counts for itself."""
    outcome = net[TRAINER].call(hop_scenes.start_sending, "site-2", ["server", "site-2"])
    assert outcome == "ok"
    net["site_2"].call(hop_scenes.claim_for_all)
    assert net[TRAINER].call(hop_scenes.statuses) == [{"site-2": "success"}]
