# SPDX-License-Identifier: Apache-2.0
"""Whole tensors take slots in the order of asking, within the budget; a slow one keeps no other waiting."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.download_service import ProduceRC

from nvflare_lazy.transport import _flow_control as whole_items
from nvflare_lazy.transport import _nvflare_private
from nvflare_lazy.transport._backends import TORCH
from nvflare_lazy.transport._flow_control import InflightBudget, WholeTensorThrottle
from nvflare_lazy.transport._memory_consumer import MemoryConsumer
from nvflare_lazy.transport.offload import TransferRuntime
from nvflare_lazy.transport.receive import RemotePayload


@pytest.fixture
def throttle():
    return WholeTensorThrottle(InflightBudget(32))


def start(function, *args, **kwargs):
    thread = threading.Thread(target=function, args=args, kwargs=kwargs, daemon=True)
    thread.start()
    return thread


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_as_many_as_fit(throttle):
    """Slots are given as long as the budget lasts, and again when one ends."""
    first, second = throttle.acquire(16), throttle.acquire(16)
    assert throttle.acquire_if_free(1 << 10) is None
    assert throttle.used == 32
    throttle.release(first)
    throttle.release(first)  # once is enough
    assert throttle.acquire_if_free(16) is not None
    throttle.release(second)
    assert throttle.used == 16


def test_header(throttle):
    """Tensors that just fit may bring their headers."""
    throttle.acquire(17)
    assert throttle.acquire_if_free(17) is not None


def test_larger_than_the_budget(throttle):
    """A tensor larger than the budget passes, alone."""
    slot = throttle.acquire(1000)
    assert throttle.acquire_if_free(1) is None
    throttle.release(slot)
    assert throttle.acquire_if_free(1) is not None


def test_in_the_order_of_asking(throttle):
    """A receiver that has just had a turn is queued behind all others that waited."""
    got = []
    slot = throttle.acquire(32)

    def ask(name, after=None):
        mine = throttle.acquire(32, after=after, give_up=lambda: False)
        got.append(name)
        throttle.release(mine)

    threads = []
    for place, name in enumerate(("second", "third"), 1):
        threads.append(start(ask, name))
        wait_until(lambda place=place: len(throttle._line) == place)
    assert throttle.acquire_if_free(0) is None  # nor is it overtaken
    threads.append(start(ask, "first, again", slot))
    for thread in threads:
        thread.join(60)
    assert got == ["second", "third", "first, again"]


def test_who_is_slow(throttle, monkeypatch):
    """A tensor that takes long no longer counts, and its receiver does not wait for the next one."""
    monkeypatch.setattr(whole_items, "_SLOW_SECONDS", 0.05)
    slow = throttle.acquire(32)
    quick = throttle.acquire(32, give_up=lambda: False)
    assert slow.slow
    before = time.monotonic()
    monkeypatch.setattr(whole_items, "_SLOW_SECONDS", 600)
    throttle.acquire(32, after=slow, give_up=lambda: False)
    assert time.monotonic() - before < 300
    assert throttle.used == 64
    assert not quick.slow


def test_patience(throttle, monkeypatch):
    """Without a reason to give up, a receiver is answered after a little while, however much is in flight."""
    monkeypatch.setattr(whole_items, "_MAX_WAIT_SECONDS", 0.1)
    throttle.acquire(32)
    throttle.acquire(32)
    assert throttle.used == 64


def test_giving_up(throttle):
    """A receiver that has a reason to give up waits until it holds."""
    throttle.acquire(32)
    given_up = threading.Event()
    thread = start(throttle.acquire, 32, give_up=given_up.is_set)
    time.sleep(0.1)
    assert thread.is_alive()
    given_up.set()
    thread.join(60)
    assert not thread.is_alive()


def test_work_takes_turns():
    """Work that needs memory for a moment waits for others; it runs alone if it needs more than there is."""
    budget = InflightBudget(32)
    seen = []

    def work(name):
        with budget.hold(100, lambda: None):
            seen.append((name, budget.used))

    def give_up():
        raise RuntimeError("aborted")

    assert budget.acquire(8, holding=0)
    threads = [start(work, name) for name in "ab"]
    with pytest.raises(RuntimeError, match="aborted"), budget.hold(100, give_up):
        pass
    assert seen == []
    budget.release(8)
    for thread in threads:
        thread.join(60)
    assert sorted(seen) == [("a", 100), ("b", 100)]
    assert budget.used == 0


def test_released_buffers():
    """Each time a tensor is gone, all listeners are notified, with no lock held."""
    runtime, seen = TransferRuntime(), []
    throttle = runtime.throttle
    runtime.on_buffers_released.append(lambda: seen.append(throttle.used))
    slot = throttle.acquire(20)
    throttle.release(throttle.acquire(10, after=slot))
    runtime.on_buffers_released.clear()
    throttle.release(throttle.acquire(20))
    assert seen == [10, 0]


def test_every_download_reports_released_buffers():
    """Also one that took no slot, since its sender is known to offer segments: memory is looked at in every round."""
    runtime, reports = TransferRuntime(), []
    runtime.on_buffers_released.append(lambda: reports.append(runtime.throttle.used))
    runtime.senders_with_package.add("server")
    consumer = MemoryConsumer(TORCH)
    consumer.attach(RemotePayload(runtime, None, "server", "ref"))
    consumer.acquire_slot()
    assert runtime.throttle.used == 0
    consumer.release_slot()
    assert reports == [0]


def test_first_tensor_is_let_go():
    """The list that NVFlare keeps until a download is over is empty as soon as its tensor is written."""
    end = Message({}, {_nvflare_private.STATUS: ProduceRC.EOF})
    cell = SimpleNamespace(send_request=lambda **_: end, core_cell=SimpleNamespace(my_info=SimpleNamespace(fqcn="b")))
    consumer = Keeping()
    runtime = TransferRuntime()
    consumer.attach(RemotePayload(runtime, cell, "a", "r"))
    consumer.acquire_slot()
    assert runtime.throttle.used
    data = [bytes(1000)]
    assert consumer.consume("r", {"start": 0, "count": 1}, data) == {"start": 0, "count": 1}
    assert consumer.nbytes == 1000
    assert data == []
    assert runtime.throttle.used == 0


class Keeping(MemoryConsumer):
    """Takes items without looking into them."""

    def __init__(self):
        super().__init__(None)

    def consume_items(self, items, result):
        return len(items)
