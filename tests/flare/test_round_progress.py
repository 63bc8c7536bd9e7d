# SPDX-License-Identifier: Apache-2.0
"""The progress of a running round: received and aggregated results, the time of a line, and its text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nvflare_lazy.aggregation import Progress
from nvflare_lazy.flare import round_progress
from nvflare_lazy.flare.round_log import RoundLog
from nvflare_lazy.flare.round_progress import RoundProgress
from nvflare_lazy.transport.running_downloads import DownloadProgress

GIB = 1 << 30


@pytest.fixture
def scene():
    """A round of four clients at time 0, with downloads and a clock that the test controls."""
    log = RoundLog(None, lambda line: None)
    scene = SimpleNamespace(log=log, now=0.0, downloads=[], reports=[], looks=[], model=0)
    scene.progress = RoundProgress(
        log.running,
        lambda: [DownloadProgress(*download) for download in scene.downloads],
        lambda: scene.model,
        scene.reports.append,
        scene.looks.append,
        lambda: scene.now,
    )

    def look(now):
        scene.now = now
        return scene.progress.look()

    scene.look = look
    log.start_round(3)
    for client in ("site-1", "site-2", "site-3", "site-4"):
        log.on_task_sent(client)
    return scene


def test_bytes_of_each_client_and_of_all(scene):
    """Complete results, running downloads and failed tasks count; results that have not started are estimated."""
    scene.log.on_result("site-1", GIB, 3, on_disk=True)
    scene.log.on_skip("site-4", "its task failed")
    scene.downloads = [
        # Behind a relay, and in two payloads; the last one is not of a client of the round.
        ("relay.site-2.job.trainer", 100 << 20, GIB // 2),
        ("relay.site-2.job.trainer", 0, GIB // 2),
        ("server.other", 5, 7),
    ]
    report = scene.look(1.0)
    assert [(client.client, client.received, client.total, client.is_complete) for client in report.clients] == [
        ("site-1", GIB, GIB, True),
        ("site-2", 100 << 20, GIB, False),
        ("site-3", 0, None, False),
        ("site-4", 0, 0, True),
    ]
    assert (report.received, report.total, report.is_estimate) == (GIB + (100 << 20), 3 * GIB, True)
    assert report.line() == (
        "Round 3: received 36 % (1.1 GiB of about 3.0 GiB), 2 of 4 results complete; in progress: "
        "site-2 100.0 MiB of 1.0 GiB"
    )
    assert report.numbers() == {
        "progress_bytes": float(report.received),
        "progress_results": 2.0,
        "progress_percent": 36.6,
    }


def test_unknown_sizes(scene):
    """Without any known size no percentage is shown; with a model, its size is assumed."""
    scene.downloads = [("site-1", 1 << 20, None)]
    report = scene.look(1.0)
    assert (report.total, report.share) == (None, 0.0)
    assert report.line().startswith("Round 3: received 1.0 MiB, 0 of 4 results complete; in progress: site-1 1.0 MiB")
    scene.model = GIB
    assert scene.look(2.0).total == 4 * GIB


def test_lines_at_a_bounded_rate(scene):
    """The first line is due after half a minute of transfer, and so is each further one, with the rate since then."""
    for now in range(600):  # the clients train
        scene.look(now)
    for now in range(600, 700):
        scene.downloads = [("site-1", (now - 600) << 20, GIB)]
        scene.look(now)
    assert [line.received >> 20 for line in scene.reports] == [30, 60, 90]
    assert [round(line.rate) for line in scene.reports] == [1 << 20] * 3
    assert ", 1.0 MiB/s; in progress: site-1 30.0 MiB of 1.0 GiB" in scene.reports[0].line()
    # Short transfers have no line, however many they are.
    scene.reports.clear()
    for now in range(700, 2000):
        scene.downloads = [("site-2", now % 25, 25)] if now % 25 else []
        scene.look(now)
    assert scene.reports == []
    assert len(scene.looks) == 2000
    scene.log.end_round()
    assert scene.look(2001.0) is None
    assert scene.looks[-1] is None


def test_a_transfer_that_stalls(scene):
    """It has lines, with no rate: the time when nothing comes is the time when they are needed."""
    for now in range(70):
        scene.downloads = [("site-1", 1 << 20, GIB)]
        scene.look(now)
    assert len(scene.reports) == 2
    assert "/s" not in scene.reports[-1].line()


def test_many_clients_and_hostile_names(scene):
    """A line lists the five clients with the smallest parts; names that could be mistaken for something are quoted."""
    scene.log.start_round(4)
    names = [f"site-{number:03}" for number in range(200)] + ["evil\nRound 9: done"]
    for name in names:
        scene.log.on_task_sent(name)
    scene.downloads = [(name, 1000 - number, 1000) for number, name in enumerate(names)]
    line = scene.look(1.0).line()
    assert line.endswith("site-198 802 B of 1000 B, site-197 803 B of 1000 B, site-196 804 B of 1000 B, 196 more")
    assert "in progress: 'evil\\nRound 9: done' 800 B of 1000 B, site-199" in line
    assert "\n" not in line


def test_aggregation(scene):
    """The percentage of the running pass, until the aggregation ends."""
    for client in ("site-1", "site-2"):
        scene.log.on_result(client, GIB, 3, on_disk=True)
    scene.log.on_aggregation_progress(Progress("pairwise distances", GIB, 2 * GIB))
    for now in range(40):
        report = scene.look(now)
    assert report.line() == "Round 3: aggregating, pairwise distances 50 % (1.0 GiB of 2.0 GiB)"
    assert report.numbers()["aggregation_percent"] == 50.0
    assert len(scene.reports) == 1
    scene.log.on_aggregated(40.0, ["site-1", "site-2"])
    assert not scene.look(41.0).is_active


def test_the_thread_ends(scene, monkeypatch):
    """It checks automatically, and not after `stop()`, which waits for it."""
    monkeypatch.setattr(round_progress, "_SECONDS_BETWEEN_LOOKS", 0.001)
    import threading

    looked = threading.Event()
    scene.progress._on_look = lambda report: looked.set()
    scene.progress.start()
    assert looked.wait(60)
    scene.progress.stop()
    assert not scene.progress._thread.is_alive()
