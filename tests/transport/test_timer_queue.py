# SPDX-License-Identifier: Apache-2.0
"""Things to be done later: in time, in order, on one thread that is there only as long as it is needed."""

from __future__ import annotations

import threading
import time

from nvflare.fuel.f3.streaming.byte_receiver import RxTask

from nvflare_lazy.transport import nvflare_private
from nvflare_lazy.transport.timer_queue import TimerQueue

NAME = "later_in_tests"


def running():
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def wait_until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_in_time():
    """What is due first is done first, whatever was asked for first, and then the thread ends."""
    queue, done = TimerQueue(NAME), []
    for number, seconds in enumerate((0.3, 0.1, 0.2)):
        queue.call_later(seconds, lambda number=number: done.append(number))
    assert len(running()) == 1
    wait_until(lambda: len(done) == 3)
    assert done == [1, 2, 0]
    wait_until(lambda: not running())
    queue.call_later(0, lambda: done.append(3))
    wait_until(lambda: done[-1] == 3)


def test_cancelled():
    """What was cancelled is not done, and cancelling what was done does nothing."""
    queue, done = TimerQueue(NAME), []
    queue.call_later(0.05, lambda: done.append("cancelled")).cancel()
    queue.call_later(60, print).cancel()
    kept = queue.call_later(0.06, lambda: done.append("kept"))
    wait_until(lambda: done)
    kept.cancel()
    assert done == ["kept"]
    wait_until(lambda: not running())  # what was cancelled is not waited for


def test_error(caplog):
    """An error is logged, and what comes after it is done."""
    queue, done = TimerQueue(NAME), []
    queue.call_later(0.01, lambda: 1 / 0)
    queue.call_later(0.02, lambda: done.append(1))
    wait_until(lambda: done)
    assert "ZeroDivisionError" in caplog.text


def test_notes_of_nvflare(monkeypatch):
    """NVFlare's notes of what was received are removed in time, without a thread for each."""
    monkeypatch.setattr(RxTask, "_schedule_remove_task", RxTask._schedule_remove_task)
    nvflare_private.forget_what_was_received_on_one_thread()
    tasks = [RxTask(number, "tests", None) for number in range(50)]
    RxTask.rx_task_map.update({("tests", task.sid): task for task in tasks})
    before = threading.active_count()
    for task in tasks:
        task._schedule_remove_task(0.3)
    assert threading.active_count() <= before + 1
    wait_until(lambda: not any(origin == "tests" for origin, _ in list(RxTask.rx_task_map)))
    assert all(task.cleanup_timer is None for task in tasks)
